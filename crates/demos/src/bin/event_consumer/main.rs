//! Proves that every message of a queue with acknowledgements ends completed or set aside, with one stored result,
//! while its workers are killed in the middle of their work, and that every effect belongs to an attempt.
//!
//! The [`worker`] uses the crate. Its effect is a text through a gateway that does not recognise repeats. The gateway
//! gives some requests no answer until their worker is killed, and answers others with an error after the effect.

mod worker;

use std::process::ExitCode;

use demos::books::Books;
use demos::crew::Crew;
use demos::gateway::{Gateway, Mishap, REFUSED};
use demos::queue::{self, Queue};
use demos::schema::{Schema, count};

const NAME: &str = "event_consumer";
const WORKERS: usize = 4;
const REQUESTS: usize = 240;
/// One message in so many comes twice.
const TWICE: usize = 6;
const POISON: usize = 6;
const KILLS: usize = 12;
/// The worst case of a failure: it comes after the effect.
const FAILURES: usize = 12;

fn main() -> ExitCode {
    demos::program::run_worker(NAME, worker::work).unwrap_or_else(|| demos::program::run(NAME, queue::TABLES, demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let queue = Queue { pool: schema.pool(2).await? };
    let mut gateway = Gateway::start().await?;
    gateway.fail_next_texts([Mishap::CallerDies { done: true }; KILLS]);
    gateway.fail_next_texts([Mishap::NoAnswer { done: true }; FAILURES]);
    books.scene(&format!("{REQUESTS} requests, some of them sent twice, {POISON} that always fail, {WORKERS} workers"));
    for number in 0..REQUESTS {
        queue.send(&request(number)).await?;
        if number.is_multiple_of(TWICE) {
            // Right behind the first, which is often in flight then.
            queue.send(&request(number)).await?;
        }
    }
    for number in 0..POISON {
        queue.send(&format!("{REFUSED} {number}")).await?;
    }
    let url = gateway.url.clone();
    let mut crew = Crew::start(schema, WORKERS, &[&url]).await?;
    crew.work(&mut gateway.deaths, queue.handled()).await?;
    books.check("SIGKILLs to a worker, after its effect and before its result", crew.killed, KILLS);
    let completed = queue.in_state("completed").await?.len();
    books.check("messages completed", completed, REQUESTS + REQUESTS.div_ceil(TWICE));
    books.check("messages set aside as poison", queue.in_state("poison").await?.len(), POISON);

    books.scene("The books");
    let effects: Vec<usize> = (0..REQUESTS).map(|number| gateway.texts_to(&request(number))).collect();
    books.check("completed requests without an effect", effects.iter().filter(|effects| **effects == 0).count(), 0);
    let total: usize = effects.iter().sum();
    books.note("effects", total);
    books.check_at_least("effects that were repeated", (total - REQUESTS) as i64, (KILLS + FAILURES) as i64);
    let attempts = "select sum(attempt) from records where completed_at is not null";
    let attempts = count(&queue.pool, attempts).await?;
    books.check("effects without an attempt", (total as i64 - attempts).max(0), 0);
    let results = "select count(*) from records where response_body is not null";
    books.check("stored results", count(&queue.pool, results).await?, REQUESTS);
    let exhausted = "select count(*) from records where completed_at is null and attempt = 3";
    books.check("requests that have used up three attempts", count(&queue.pool, exhausted).await?, POISON);
    let differing = "
        select count(*)
        from message
        left join records on records.value = message.request_id
        where (state = 'completed') is distinct from (completed_at is not null)
    ";
    books.check("messages whose state differs from their record's", count(&queue.pool, differing).await?, 0);
    Ok(())
}

fn request(number: usize) -> String {
    format!("request {number}")
}
