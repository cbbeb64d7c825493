//! Proves that every message of a queue with acknowledgements ends completed or set aside, with one stored result, while
//! its workers are killed in the middle of their work, and that every repeated effect has a cause.
//!
//! ```sh
//! cargo run -p demos --bin event_consumer # on a temporary PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! The [`worker`] uses the crate. The [`queue`] is a table, and so is the outside world. This file sends the messages,
//! kills workers after their effect and before their result, and compares the counts.

mod queue;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use demos::books::Books;
use demos::crew::Crew;
use demos::schema::{Schema, count};
use sqlx::PgPool;
use tokio::time::interval;

use queue::{Body, Queue};

const NAME: &str = "event_consumer";
/// It takes ten seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(60);
const WORKERS: usize = 4;
/// Often enough to hit work of a second and a half in its middle.
const LOOK: Duration = Duration::from_millis(100);
/// With the 40 of them that come twice, 300 messages.
const REQUESTS: i64 = 260;
/// With fewer, a run proves little.
const FEWEST_KILLS: i64 = 10;

/// Counts that vary from run to run.
const COUNTED: [(&str, &str); 10] = [
    ("messages completed", "select count(*) from message where state = 'completed'"),
    ("messages set aside as poison", "select count(*) from message where state = 'poison'"),
    ("deliveries", "select count(*) from delivery"),
    ("  performed", "select count(*) from delivery where outcome = 'performed'"),
    ("  replayed", "select count(*) from delivery where outcome = 'replayed'"),
    ("  in flight elsewhere, so delivered again", "select count(*) from delivery where outcome = 'in flight'"),
    ("  failed, so delivered again", "select count(*) from delivery where outcome = 'failed'"),
    ("  lease lost, so delivered again", "select count(*) from delivery where outcome = 'lease lost'"),
    ("  set aside, after three attempts", "select count(*) from delivery where outcome = 'set aside'"),
    ("effects", "select count(*) from effect"),
];

/// Counts that must be 0. A kill, a failure or a lost lease cuts an attempt short. The third one is the last.
const NEVER: [(&str, &str); 9] = [
    ("messages neither completed nor set aside", "select count(*) from message where state = 'waiting'"),
    (
        "requests that always fail, and are not set aside",
        "select count(*) from request where body = 'always_fails' and not set_aside",
    ),
    ("requests set aside before three attempts", "select count(*) from request where set_aside and cut_short < 3"),
    ("requests both completed and set aside", "select count(*) from request where set_aside and completed"),
    ("completed requests without an effect", "select count(*) from request where completed and effects = 0"),
    (
        "requests with an effect that has no cause",
        "select count(*) from request where effects > cut_short + case when completed then 1 else 0 end",
    ),
    (
        "completed requests without a stored result",
        "select count(*) from request left join stored using (request_id) where completed and result is null",
    ),
    ("requests whose result was stored twice", "select count(*) from request where performed > 1"),
    (
        "messages acknowledged with another result",
        "select count(*) from message join stored using (request_id) where message.result <> stored.result",
    ),
];

fn main() -> ExitCode {
    demos::program::run_worker(NAME, worker::work)
        .unwrap_or_else(|| demos::program::run(NAME, queue::TABLES, LIMIT, demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let pool = schema.pool(2).await?;
    let queue = Queue { pool: pool.clone(), scope: schema.scope("queue") };
    books.scene(&format!("{REQUESTS} requests, some of them sent twice, and {WORKERS} workers"));
    send_all(&queue).await?;
    let mut crew = Crew::start(schema, WORKERS, &[]).await?;
    let mut look = interval(LOOK);
    while count(&pool, "select count(*) from message where state = 'waiting'").await? > 0 {
        look.tick().await;
        crew.must_be_alive()?;
        kill(&mut crew, &pool).await?;
    }
    books.check_at_least("SIGKILLs to a worker", crew.killed, FEWEST_KILLS);
    crew.end().await?;
    for (what, sql) in COUNTED {
        books.note(what, count(&pool, sql).await?);
    }

    books.scene("The books");
    for (what, sql) in NEVER {
        books.check(what, count(&pool, sql).await?, 0);
    }
    Ok(())
}

/// By number, so that every run has the same messages. The steps are no multiples of each other, so messages of every
/// kind come twice.
async fn send_all(queue: &Queue) -> sqlx::Result<()> {
    let mut late = Vec::new();
    for number in 0..REQUESTS {
        let request_id = format!("request-{number:03}");
        let body = match number {
            _ if number % 16 == 5 => Body::Slow,
            _ if number % 24 == 10 => Body::FailsTwice,
            _ if number % 32 == 20 => Body::AlwaysFails,
            _ => Body::Plain,
        };
        // Of four slow requests, one is left in peace, two get through in the second attempt, and one in the third,
        // which is the last.
        let kills = match (body, number / 16 % 4) {
            (Body::Slow, 0 | 1) => 1,
            (Body::Slow, 2) => 2,
            _ => 0,
        };
        queue.send(&request_id, body, kills).await?;
        match number % 13 {
            // Right behind the first, which is often in flight then.
            0 => queue.send(&request_id, body, kills).await?,
            // Behind all others, when the first is mostly completed.
            1 => late.push((request_id, body, kills)),
            _ => {}
        }
    }
    for (request_id, body, kills) in late {
        queue.send(&request_id, body, kills).await?;
    }
    Ok(())
}

/// Kills the workers whose effect is there and whose result is not, as often as the message says.
async fn kill(crew: &mut Crew<'_>, pool: &PgPool) -> anyhow::Result<()> {
    let victims: Vec<i64> = sqlx::query_scalar(
        "
        select delivery.worker
        from delivery
        join effect on effect.delivery = delivery.number
        join message on message.number = delivery.message
        where outcome is null
            and message.kills > (
                select count(*)
                from delivery as killed
                where killed.request_id = delivery.request_id and killed.outcome = 'killed'
            )
        ",
    )
    .fetch_all(pool)
    .await?;
    for worker in victims {
        crew.kill(u32::try_from(worker)?).await?;
        let note = "update delivery set outcome = 'killed' where worker = $1::int8 and outcome is null";
        sqlx::query(note).bind(worker).execute(pool).await?;
    }
    Ok(())
}
