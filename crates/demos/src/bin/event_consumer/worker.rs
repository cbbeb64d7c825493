//! A worker: takes a message, handles it under a lease, and tells the queue what became of it.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Leasing, Policy};
use pg_idempotency::{Error, Key};
use tokio::time::sleep;

use crate::effect::{Failure, Outside};
use crate::queue::{Delivery, Queue, Why};
use crate::schema::Schema;

/// How long a request waits after its worker's death. 40 seconds are usual; this one has to be watched.
pub(crate) const LEASE: Duration = Duration::from_secs(1);

/// A worker that was killed counts as an attempt too: a message may be what kills it.
const ATTEMPTS: NonZeroU32 = NonZeroU32::new(3).expect("3 is not 0");

/// Between two attempts of what has failed, and between two looks into an empty queue.
const PAUSE: Duration = Duration::from_millis(50);

/// The queue, a claim and a renewal of it can want a connection at the same time.
const CONNECTIONS: u32 = 3;

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema) -> anyhow::Result<()> {
    let queue = Queue { pool: schema.pool(CONNECTIONS).await? };
    let outside = Outside { pool: schema.pool(1).await? };
    let leasing = Leasing::new(Policy::AtLeastOnce { lease: LEASE })?.with_max_attempts(ATTEMPTS);
    loop {
        match queue.take().await? {
            Some(delivery) => handle(&queue, leasing, &outside, &delivery).await?,
            None => sleep(PAUSE).await,
        }
    }
}

async fn handle(queue: &Queue, leasing: Leasing, outside: &Outside, delivery: &Delivery) -> anyhow::Result<()> {
    let key = Key::new("queue", "message.handled", &delivery.request_id)?;
    let handled = leasing
        .ensure(&queue.pool, &key, &delivery.body, async |lease| outside.affect(delivery, lease.attempt()).await)
        .await;
    let error = match handled {
        // Here or elsewhere, now or before: it is done, and the result is the same.
        Ok(outcome) => return queue.ack(delivery, &outcome).await,
        Err(error) => error,
    };
    let text = error.to_string();
    match error {
        // Another worker is at it, or was when it died. Unless it is renewed, its lease has lapsed after this long.
        Failure::Idempotency(Error::InFlight { retry_after, .. }) => {
            queue.nack(delivery, Why::InFlight, &text, retry_after).await?;
        }
        // This worker was too slow, and another may be done by now. The next delivery tells.
        Failure::Idempotency(Error::LeaseLost) => queue.nack(delivery, Why::LeaseLost, &text, PAUSE).await?,
        // No delivery will change these: the attempts are used up, or the request id came with another body.
        Failure::Idempotency(Error::Exhausted { .. } | Error::KeyReused { .. }) => {
            queue.set_aside(delivery, &text).await?;
        }
        // The work failed, and the claim is released by now; or the database did, and the claim will lapse.
        _ => queue.nack(delivery, Why::Failed, &text, PAUSE).await?,
    }
    Ok(())
}
