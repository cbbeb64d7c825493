//! A worker: takes a message, handles it under a lease, and then acknowledges it, gives it back, or sets it aside.

use std::num::NonZeroU32;
use std::time::Duration;

use demos::outside::{Failure, Outside, reference};
use demos::queue::{Message, Queue};
use demos::schema::Schema;
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Error, Key};

/// How long a request waits after its worker's death. 40 seconds are usual. This one has to be watched.
const LEASE: Duration = Duration::from_secs(1);

/// A killed worker counts as an attempt too, because a message may be what kills it.
const ATTEMPTS: NonZeroU32 = NonZeroU32::new(3).expect("3 is not 0");

/// Between two attempts of failing work.
const PAUSE: Duration = Duration::from_millis(50);

/// The queue, a claim and its renewal can each need a connection at the same time.
const CONNECTIONS: u32 = 3;

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, arguments: &[String]) -> anyhow::Result<()> {
    let [gateway] = arguments else { anyhow::bail!("a worker gets the gateway's URL") };
    let (queue, outside) = (Queue { pool: schema.pool(CONNECTIONS).await? }, Outside::new(gateway));
    let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: LEASE }).max_attempts(ATTEMPTS);
    queue
        .work(async |message| {
            let key = Key::new(schema.scope("queue"), "message.handled", &message.request_id)?;
            handle(&queue, &leasing, &key, &outside, message).await
        })
        .await
}

async fn handle(
    queue: &Queue,
    leasing: &LeaseOptions,
    key: &Key,
    outside: &Outside,
    message: &Message,
) -> anyhow::Result<()> {
    let handled = leasing
        .run(&queue.pool, key, message, async |lease| {
            let reference = reference(&lease.downstream_key(), lease.attempt());
            outside.text(reference, &message.request_id).await
        })
        .await;
    match handled {
        // It is done, here or elsewhere.
        Ok(_) => queue.ack(message, "completed").await?,
        // Another worker handles it, or did when it died. Unless it is renewed, that lease has lapsed after this time.
        Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => queue.nack(message, retry_after).await?,
        // No delivery will change these: the attempts are used up, or the request id came with another body.
        Err(Failure::Idempotency(Error::Exhausted { .. } | Error::KeyReused { .. })) => {
            queue.ack(message, "poison").await?;
        }
        // The work failed, and the claim is released. Or the lease was lost or the database failed: then another worker
        // may have finished, and the next delivery shows that.
        Err(_) => queue.nack(message, PAUSE).await?,
    }
    Ok(())
}
