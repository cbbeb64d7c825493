//! A process that takes events and sends their texts under `AtMostOnce`, with a reconciler beside.

use std::future::pending;
use std::time::Duration;

use demos::broker::{Broker, Delivery, Event};
use demos::gateway::Receipt;
use demos::outside::Failure;
use demos::schema::Schema;
use futures_util::future::try_join_all;
use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Policy, Reconciler};
use pg_idempotency::{Error, Key, Outcome};
use sqlx::PgPool;

use crate::provider::{LATEST, Provider};

/// The kind of the events.
pub(crate) const KIND: &str = "texts";
const OPERATION: &str = "sms.sent";
/// 40 seconds are usual. These have to be watched.
const LEASE: Duration = Duration::from_secs(3);
/// A real service chooses a quiet time that contains every delivery. Here the first probe of some texts is too early, so
/// that more than one is needed.
const QUIET: Duration = LATEST.checked_div(2).expect("two is not zero");
/// Three probes are 1 + 2 of these apart, so the last one comes after every delivery.
const DISTANCE: Duration = Duration::from_secs(1);
/// The events that a process handles at the same time.
const ABREAST: usize = 10;

fn leasing() -> LeaseOptions {
    LeaseOptions::new(Policy::AtMostOnce { lease: LEASE }).store_request(true)
}

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, provider: &str, broker: &str) -> anyhow::Result<()> {
    let (pool, provider) = (schema.pool(2 * ABREAST as u32).await?, Provider::new(provider));
    let events = Broker::connect(broker).await?.consumer(KIND).await?;
    let reconciler = Reconciler::new(leasing(), OPERATION, QUIET)?.distance(DISTANCE);
    let (reconciled, gateway) = (pool.clone(), provider.clone());
    tokio::spawn(async move {
        let look_up = async |asked: &InDoubt| -> anyhow::Result<Finding> {
            Ok(match gateway.find(&asked.downstream_key).await? {
                Some(receipt) => Finding::took_effect(&receipt)?,
                None => Finding::NoTrace,
            })
        };
        reconciler.run(&reconciled, pending(), look_up).await
    });
    println!("ready");
    let handling = async || -> anyhow::Result<()> {
        loop {
            for delivery in events.take(1).await? {
                handle(schema, &pool, &provider, &delivery).await?;
            }
        }
    };
    try_join_all((0..ABREAST).map(|_| handling())).await?;
    Ok(())
}

/// Sends the text under a lease, or returns the receipt of the text that was sent.
pub(crate) async fn send(
    schema: &Schema,
    pool: &PgPool,
    provider: &Provider,
    event: &Event,
) -> Result<Outcome<Receipt>, Failure> {
    let key = Key::new(schema.scope("shop"), OPERATION, &event.id).map_err(Error::from)?;
    leasing()
        .run(pool, &key, event, async |lease| provider.send(lease.downstream_key(), &event.id, lease.remaining()).await)
        .await
}

async fn handle(schema: &Schema, pool: &PgPool, provider: &Provider, delivery: &Delivery) -> anyhow::Result<()> {
    match send(schema, pool, provider, &delivery.event).await {
        Ok(_) => delivery.ack().await,
        // Another process sends the text, or was killed.
        Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => delivery.nack(retry_after).await,
        // A reconciler will settle the operation.
        Err(Failure::Idempotency(Error::Indeterminate { .. } | Error::LeaseLost) | Failure::Unknown(_)) => {
            delivery.nack(Duration::from_millis(500)).await;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
