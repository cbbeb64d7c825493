//! Proves that no text is sent twice although workers die between the request to the gateway and its answer, and that
//! an operator can decide every text that is in doubt.
//!
//! The [`worker`] uses the crate. The gateway gives some requests no answer until their worker is killed. A message's
//! request id is the customer's phone.

mod worker;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use demos::books::Books;
use demos::crew::Crew;
use demos::gateway::{Gateway, Mishap};
use demos::outside::{Outside, reference};
use demos::queue::{self, Queue};
use demos::schema::Schema;
use pg_idempotency::operator::{release, resolve, show};

const NAME: &str = "sms_at_most_once";
const TEXTS: usize = 40;

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
const KILLED: usize = 10;
const IN_DOUBT_AND_SENT: usize = 7;
const IN_DOUBT_AND_NOT_SENT: usize = 5;

fn main() -> ExitCode {
    demos::program::run_worker(NAME, worker::work).unwrap_or_else(|| demos::program::run(NAME, queue::TABLES, demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let queue = Queue { pool: schema.pool(3).await? };
    books.scene(&format!("{TEXTS} texts, some of whose workers die"));
    for number in 0..TEXTS {
        queue.send(&format!("phone {number}")).await?;
    }
    let mut gateway = Gateway::start().await?;
    for (count, mishap) in MISHAPS {
        gateway.fail_next_texts(vec![mishap; count]);
    }
    let url = gateway.url.clone();
    let outside = Outside::new(&url);
    let mut crew = Crew::start(schema, 3, &[&url]).await?;
    crew.work(&mut gateway, queue.handled()).await?;
    books.check("SIGKILLs to a worker", crew.killed, KILLED);
    let in_doubt = queue.in_state("in doubt").await?.len();
    books.check("texts in doubt", in_doubt, IN_DOUBT_AND_SENT + IN_DOUBT_AND_NOT_SENT);
    books.check("customers with one text", customers(&gateway), TEXTS - IN_DOUBT_AND_NOT_SENT);

    books.scene("The operator decides each text in doubt");
    let (resolved, released) = decide(schema, &queue, &outside).await?;
    books.check("resolved, because the gateway has sent the text", resolved, IN_DOUBT_AND_SENT);
    books.check("released, because it has not, and will not", released, IN_DOUBT_AND_NOT_SENT);
    crew.work(&mut gateway, queue.handled()).await?;
    books.check("customers with one text", customers(&gateway), TEXTS);

    books.scene("Each text is requested once more, as by a queue that has lost its marks");
    let mut replayed = 0;
    for message in queue.in_state("sent").await? {
        replayed += usize::from(worker::send(schema, &queue, &outside, &message).await?.is_replayed());
    }
    books.check("replayed", replayed, TEXTS);
    books.check("customers with one text", customers(&gateway), TEXTS);
    Ok(())
}

/// The number of customers with exactly one text.
fn customers(gateway: &Gateway) -> usize {
    (0..TEXTS).filter(|number| gateway.texts_to(&format!("phone {number}")) == 1).count()
}

/// Asks the gateway about each text in doubt, and sends the messages again to the workers, which find the stored receipt
/// or send the text. Returns how many texts were resolved and released.
async fn decide(schema: &Schema, queue: &Queue, outside: &Outside) -> anyhow::Result<(usize, usize)> {
    let (mut resolved, mut released) = (0, 0);
    for message in queue.in_state("in doubt").await? {
        let key = worker::key(schema, &message)?;
        let shown = show(&queue.pool, &key).await?.context("a text in doubt has a record")?;
        let downstream_key = shown.downstream_key.context("a lease has a downstream key")?;
        // The token names the claim that was looked into. After another operator, this ends with `Error::Changed`.
        match outside.withdraw(&reference(&downstream_key, shown.attempt)).await? {
            Some(receipt) => {
                resolve(&queue.pool, &key, shown.token, &receipt, RETENTION).await?;
                resolved += 1;
            }
            None => {
                release(&queue.pool, &key, shown.token, &[], "the gateway has no such text").await?;
                released += 1;
            }
        }
        queue.send(&message.request_id).await?;
    }
    Ok((resolved, released))
}
