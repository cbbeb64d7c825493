//! A process that takes messages and sends their texts under leases at most once, with a reconciler beside.

use std::future::pending;
use std::time::Duration;

use demos::gateway::Receipt;
use demos::outside::Failure;
use demos::queue::{Message, Queue};
use demos::schema::Schema;
use futures_util::future::try_join_all;
use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Policy, Reconciler};
use pg_idempotency::{Error, Key, Outcome};

use crate::provider::{LATEST, Provider};

const OPERATION: &str = "sms.sent";
/// 40 seconds are usual. These have to be watched.
const LEASE: Duration = Duration::from_secs(3);
/// A real service chooses a quiet time that contains every delivery. Here the first probe of some texts is too early, so
/// that more than one is needed.
const QUIET: Duration = LATEST.checked_div(2).expect("two is not zero");
/// Three probes are 1 + 2 of these apart, so the last one comes after every delivery.
const DISTANCE: Duration = Duration::from_secs(1);
/// The messages that a process handles at the same time.
const ABREAST: usize = 10;

fn leasing() -> LeaseOptions {
    LeaseOptions::new(Policy::AtMostOnce { lease: LEASE }).store_request(true)
}

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, provider: &str) -> anyhow::Result<()> {
    let (queue, provider) = (Queue { pool: schema.pool(2 * ABREAST as u32).await? }, Provider::new(provider));
    let reconciler = Reconciler::new(leasing(), OPERATION, QUIET)?.distance(DISTANCE);
    let (pool, gateway) = (queue.pool.clone(), provider.clone());
    tokio::spawn(async move {
        let look_up = async |asked: &InDoubt| -> anyhow::Result<Finding> {
            Ok(match gateway.find(&asked.downstream_key).await? {
                Some(receipt) => Finding::took_effect(&receipt)?,
                None => Finding::NoTrace,
            })
        };
        reconciler.run(&pool, pending(), look_up).await
    });
    println!("ready");
    let handle = async |message: &Message| handle(schema, &queue, &provider, message).await;
    try_join_all((0..ABREAST).map(|_| queue.deliver(&handle))).await?;
    Ok(())
}

/// Sends the text under a lease, or returns the receipt of the text that was sent.
pub(crate) async fn send(
    schema: &Schema,
    queue: &Queue,
    provider: &Provider,
    message: &Message,
) -> Result<Outcome<Receipt>, Failure> {
    let key = Key::new(schema.scope("shop"), OPERATION, &message.request_id).map_err(Error::from)?;
    leasing()
        .run(&queue.pool, &key, message, async |lease| {
            provider.send(lease.downstream_key(), &message.request_id, lease.remaining()).await
        })
        .await
}

async fn handle(schema: &Schema, queue: &Queue, provider: &Provider, message: &Message) -> anyhow::Result<()> {
    match send(schema, queue, provider, message).await {
        Ok(_) => queue.ack(message, "sent").await?,
        // Another process is sending it, or was when it died.
        Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => queue.nack(message, retry_after).await?,
        // A reconciler will settle it.
        Err(Failure::Idempotency(Error::Indeterminate { .. } | Error::LeaseLost) | Failure::Unknown(_)) => {
            queue.nack(message, Duration::from_millis(500)).await?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
