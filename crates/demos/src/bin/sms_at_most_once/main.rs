//! Proves that no text is sent twice although workers die between the request to the gateway and its answer, and that
//! an operator can decide every text that is in doubt.
//!
//! ```sh
//! cargo run -p demos --bin sms_at_most_once # on a temporary PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! First the job that has sent ten texts to one customer, then the same job under a lease at most once. Both are in
//! [`worker`]. The gateway gives some requests no answer until their worker is killed.

mod jobs;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use demos::books::Books;
use demos::crew::Crew;
use demos::gateway::{Gateway, Mishap};
use demos::outside::{Outside, reference};
use demos::schema::{Schema, count};
use pg_idempotency::operator::{release, resolve, show};
use tokio::time::interval;

use jobs::{Job, Jobs};

const NAME: &str = "sms_at_most_once";
const LIMIT: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(50);
const TEXTS: i64 = 40;

/// How often the first scene's worker dies. It survives the tenth text.
const DEATHS: usize = 9;

/// The retention that a worker's response would have by default.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// How many of the 40 texts go wrong in which way. From outside, a text that was sent looks like one that was not.
const MISHAPS: [(usize, Mishap); 5] = [
    (6, Mishap::CallerDies { done: true }),
    (4, Mishap::CallerDies { done: false }),
    (1, Mishap::NoAnswer { done: true }),
    (1, Mishap::NoAnswer { done: false }),
    (1, Mishap::Busy),
];
const KILLED: i64 = 10;
const IN_DOUBT_AND_SENT: i64 = 7;
const IN_DOUBT_AND_NOT_SENT: i64 = 5;

fn main() -> ExitCode {
    demos::program::run_worker(NAME, worker::work)
        .unwrap_or_else(|| demos::program::run(NAME, jobs::TABLES, LIMIT, demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let jobs = Jobs { pool: schema.pool(3).await?, scope: schema.scope("shop") };
    without_the_crate(schema, &jobs, books).await?;
    at_most_once(schema, &jobs, books).await
}

/// A job comes again until its text is marked as sent, which happens after it was sent.
async fn without_the_crate(schema: &Schema, jobs: &Jobs, books: &mut Books) -> anyhow::Result<()> {
    books.scene("Without the crate: one text, and a worker that dies after each attempt");
    let texts = jobs.add(1).await?;
    let mut gateway = Gateway::start(None).await?;
    gateway.fail_next_texts([Mishap::CallerDies { done: true }; DEATHS]);
    let url = gateway.server.url.clone();
    let mut crew = Crew::start(schema, 1, &["naive", &url]).await?;
    deliver(&mut crew, &mut gateway, jobs).await?;
    books.check("SIGKILLs to a worker", crew.killed, DEATHS);
    books.check("texts to the one customer", gateway.texts_to(&texts[0].phone), DEATHS + 1);
    crew.end().await
}

async fn at_most_once(schema: &Schema, jobs: &Jobs, books: &mut Books) -> anyhow::Result<()> {
    books.scene("At most once: the same job under a lease, for 40 texts");
    let texts = jobs.add(TEXTS).await?;
    let mut gateway = Gateway::start(None).await?;
    for (count, mishap) in MISHAPS {
        gateway.fail_next_texts(vec![mishap; count]);
    }
    let url = gateway.server.url.clone();
    let outside = Outside::new(&url);
    let mut crew = Crew::start(schema, 3, &["at-most-once", &url]).await?;
    deliver(&mut crew, &mut gateway, jobs).await?;
    books.check("SIGKILLs to a worker", crew.killed, KILLED);
    let in_doubt = IN_DOUBT_AND_SENT + IN_DOUBT_AND_NOT_SENT;
    books.check("texts in doubt", jobs.in_doubt().await?.len(), in_doubt);
    books.check("customers without a text", customers(&gateway, &texts, 0), IN_DOUBT_AND_NOT_SENT);
    books.check("customers with one text", customers(&gateway, &texts, 1), TEXTS - IN_DOUBT_AND_NOT_SENT);

    books.scene("The operator decides each text in doubt");
    let (resolved, released) = decide(jobs, &outside).await?;
    books.check("resolved, because the gateway has sent the text", resolved, IN_DOUBT_AND_SENT);
    books.check("released, because it has not, and will not", released, IN_DOUBT_AND_NOT_SENT);
    deliver(&mut crew, &mut gateway, jobs).await?;
    books.check("SIGKILLs to a worker", crew.killed, KILLED);
    crew.end().await?;
    books.check("customers with one text", customers(&gateway, &texts, 1), TEXTS);

    books.scene("Each text is requested once more, as by a queue that has lost its marks");
    let mut replayed = 0;
    for job in &texts {
        replayed += i64::from(worker::send(jobs, &outside, job).await?.is_replayed());
    }
    books.check("replayed", replayed, TEXTS);
    books.check("customers with one text", customers(&gateway, &texts, 1), TEXTS);
    Ok(())
}

fn customers(gateway: &Gateway, texts: &[Job], with: usize) -> usize {
    texts.iter().filter(|job| gateway.texts_to(&job.phone) == with).count()
}

/// Kills the workers that the gateway names, until no job is left that a worker can do.
async fn deliver(crew: &mut Crew<'_>, gateway: &mut Gateway, jobs: &Jobs) -> anyhow::Result<()> {
    let mut look = interval(LOOK);
    loop {
        tokio::select! {
            Some(worker) = gateway.deaths.recv() => crew.kill(worker).await?,
            _ = look.tick() => {
                crew.must_be_alive()?;
                if count(&jobs.pool, "select count(*) from job where state = 'waiting'").await? == 0 {
                    return Ok(());
                }
            }
        }
    }
}

/// Asks the gateway about each text in doubt, and gives the jobs back to the workers, which find the stored receipt or
/// send the text. Returns how many texts were resolved and released.
async fn decide(jobs: &Jobs, outside: &Outside) -> anyhow::Result<(i64, i64)> {
    let (mut resolved, mut released) = (0, 0);
    for job in jobs.in_doubt().await? {
        let key = jobs.key(&job)?;
        let shown = show(&jobs.pool, &key).await?.context("a job in doubt has a record")?;
        let downstream_key = shown.downstream_key.context("a lease has a downstream key")?;
        // The token names the claim that was looked into. After another operator, this ends with `Error::Changed`.
        match outside.withdraw(&reference(&downstream_key, shown.attempt)).await? {
            Some(receipt) => {
                resolve(&jobs.pool, &key, shown.token, &receipt, RETENTION).await?;
                resolved += 1;
            }
            None => {
                release(&jobs.pool, &key, shown.token, &[], "the gateway has no such text").await?;
                released += 1;
            }
        }
        jobs.set(&job, "waiting", Duration::ZERO).await?;
    }
    Ok((resolved, released))
}
