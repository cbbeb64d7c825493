//! A worker: takes a message, and sends its text under a lease at most once.

use std::time::Duration;

use demos::gateway::Receipt;
use demos::outside::{Failure, Outside, reference};
use demos::queue::{Message, Queue};
use demos::schema::Schema;
use pg_idempotency::lease::{Leasing, Policy};
use pg_idempotency::{Error, InvalidKey, Key, Outcome};

/// After this long, a text whose worker died is left to the operator. 40 seconds are usual. This one has to be watched.
const LEASE: Duration = Duration::from_secs(2);

/// The queue, a claim and its renewal can each need a connection at the same time.
const CONNECTIONS: u32 = 3;

pub(crate) fn key(schema: &Schema, message: &Message) -> Result<Key, InvalidKey> {
    Key::new(schema.scope("shop"), "sms.sent", &message.request_id)
}

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, arguments: &[String]) -> anyhow::Result<()> {
    let [gateway] = arguments else { anyhow::bail!("a worker gets the gateway's URL") };
    let (queue, outside) = (Queue { pool: schema.pool(CONNECTIONS).await? }, Outside::new(gateway));
    queue.work(async |message| handle(schema, &queue, &outside, message).await).await
}

/// Sends the text under a lease, or returns the receipt of the text that was sent.
pub(crate) async fn send(
    schema: &Schema,
    queue: &Queue,
    outside: &Outside,
    message: &Message,
) -> Result<Outcome<Receipt>, Failure> {
    let key = key(schema, message).map_err(Error::from)?;
    let leasing = Leasing::new(Policy::AtMostOnce { lease: LEASE }).map_err(Error::from)?;
    leasing
        .ensure(&queue.pool, &key, message, async |lease| {
            let reference = reference(&lease.downstream_key(), lease.attempt());
            match outside.text(reference, &message.request_id).await {
                // Every other error leaves the text to the operator.
                Err(error @ Failure::NotDone(_)) => Err(lease.not_performed(error)),
                sent => sent,
            }
        })
        .await
}

async fn handle(schema: &Schema, queue: &Queue, outside: &Outside, message: &Message) -> anyhow::Result<()> {
    match send(schema, queue, outside, message).await {
        Ok(_) => queue.ack(message, "sent").await?,
        // Another worker is sending it, or was when it died.
        Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => queue.nack(message, retry_after).await?,
        Err(Failure::Idempotency(Error::Indeterminate { .. })) => queue.ack(message, "in doubt").await?,
        // A text that was not sent may be claimed at once. A text that was perhaps sent is indeterminate now, and the
        // text of a lost lease will be: the next worker learns that, and leaves it to the operator.
        Err(Failure::NotDone(_) | Failure::Unknown(_) | Failure::Idempotency(Error::LeaseLost)) => {
            queue.nack(message, Duration::ZERO).await?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
