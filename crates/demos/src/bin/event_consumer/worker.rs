//! A worker: takes a message, handles it under a lease, and then acknowledges it, gives it back, or sets it aside.

use std::num::NonZeroU32;
use std::time::Duration;

use demos::schema::Schema;
use pg_idempotency::lease::{Leasing, Policy};
use pg_idempotency::{Error, Key, Outcome};
use sqlx::PgPool;
use tokio::time::sleep;

use crate::queue::{Body, Delivery, Queue};

/// How long a request waits after its worker's death. 40 seconds are usual. This one has to be watched.
const LEASE: Duration = Duration::from_secs(1);

/// A killed worker counts as an attempt too, because a message may be what kills it.
const ATTEMPTS: NonZeroU32 = NonZeroU32::new(3).expect("3 is not 0");

/// Between two attempts of failing work, and between two looks into an empty queue.
const PAUSE: Duration = Duration::from_millis(50);

/// The queue, a claim and its renewal can each need a connection at the same time.
const CONNECTIONS: u32 = 3;

/// As long as an answer from a near service takes.
const PLAIN: Duration = Duration::from_millis(20);

/// Longer than the lease, which has to be renewed, and longer than the queue's visibility. The kills come meanwhile.
const SLOW: Duration = Duration::from_millis(1500);

/// Why a request was neither handled nor replayed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Idempotency(#[from] Error),

    #[error("the other side could not be reached: {0}")]
    Unreachable(sqlx::Error),

    /// The worst case of a failure: it comes after the effect.
    #[error("the other side took the request and answered 500")]
    Refused,
}

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, _: &[String]) -> anyhow::Result<()> {
    let queue = Queue { pool: schema.pool(CONNECTIONS).await?, scope: schema.scope("queue") };
    // Connections that are never in a transaction, and that the queue does not use.
    let outside = schema.pool(1).await?;
    let leasing = Leasing::new(Policy::AtLeastOnce { lease: LEASE })?.with_max_attempts(ATTEMPTS);
    println!("ready");
    loop {
        match queue.take().await? {
            Some(delivery) => handle(&queue, leasing, &outside, &delivery).await?,
            None => sleep(PAUSE).await,
        }
    }
}

async fn handle(queue: &Queue, leasing: Leasing, outside: &PgPool, delivery: &Delivery) -> anyhow::Result<()> {
    let key = Key::new(&queue.scope, "message.handled", &delivery.request_id)?;
    let handled = leasing
        .ensure(&queue.pool, &key, &delivery.body, async |lease| affect(outside, delivery, lease.attempt()).await)
        .await;
    match handled {
        // It is done, here or elsewhere, and the result is the same.
        Ok(Outcome::Performed(result)) => queue.ack(delivery, "performed", &result.to_string()).await?,
        Ok(Outcome::Replayed(result)) => queue.ack(delivery, "replayed", &result.to_string()).await?,
        // Another worker handles it, or did when it died. Unless it is renewed, that lease has lapsed after this time.
        Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => {
            queue.nack(delivery, "in flight", retry_after).await?;
        }
        // This worker was too slow, and another may have finished. The next delivery shows the result.
        Err(Failure::Idempotency(Error::LeaseLost)) => queue.nack(delivery, "lease lost", PAUSE).await?,
        // No delivery will change these: the attempts are used up, or the request id came with another body.
        Err(Failure::Idempotency(Error::Exhausted { .. } | Error::KeyReused { .. })) => {
            queue.set_aside(delivery).await?;
        }
        // The work failed, and the claim is released; or the database failed, and the claim will lapse.
        Err(_) => queue.nack(delivery, "failed", PAUSE).await?,
    }
    Ok(())
}

/// Has an effect that no rollback undoes, and takes a while. Returns the delivery that had it.
async fn affect(outside: &PgPool, delivery: &Delivery, attempt: u32) -> Result<i64, Failure> {
    sqlx::query("insert into effect (request_id, delivery) values ($1::text, $2::int8)")
        .bind(&delivery.request_id)
        .bind(delivery.number)
        .execute(outside)
        .await
        .map_err(Failure::Unreachable)?;
    match delivery.body {
        Body::Plain => sleep(PLAIN).await,
        Body::Slow => sleep(SLOW).await,
        Body::FailsTwice if attempt > 2 => sleep(PLAIN).await,
        Body::FailsTwice | Body::AlwaysFails => return Err(Failure::Refused),
    }
    Ok(delivery.number)
}
