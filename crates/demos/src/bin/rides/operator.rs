//! The operator: finds out at the gateway whether a text that is in doubt was sent, and settles its ride.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use pg_idempotency::Error;
use pg_idempotency::operator::{Shown, unsettled};
use pg_idempotency::operator::{release_step, resolve_step};
use tokio::time::sleep;

use crate::mutant::Mutant;
use crate::ride::{ATTEMPTS, Rides, reference};

const PAUSE: Duration = Duration::from_millis(200);
const AT_ONCE: u32 = 100;

/// What was decided, and how often.
#[derive(Default)]
pub(crate) struct Decided {
    pub(crate) resolved: AtomicUsize,
    pub(crate) released: AtomicUsize,
}

/// Settles each ride with a text in doubt. Ends only with an error.
pub(crate) async fn settle(rides: &Rides, decided: &Decided) -> anyhow::Result<()> {
    loop {
        let found = unsettled(&rides.pool, AT_ONCE, Some(ATTEMPTS)).await?;
        for found in found.iter().filter(|found| found.key.operation() == rides.operation) {
            match settle_one(rides, found, decided).await {
                // It was settled meanwhile, or its owner was only suspended and has changed it since.
                Err(error) if matches!(error.downcast_ref(), Some(Error::Changed)) => {}
                settled => settled?,
            }
        }
        sleep(PAUSE).await;
    }
}

async fn settle_one(rides: &Rides, found: &Shown, decided: &Decided) -> anyhow::Result<()> {
    // A ride has one step that can be in doubt: the text.
    let [step] = &found.steps_in_doubt()[..] else { bail!("a ride has used up its attempts") };
    let downstream_key = found.downstream_key.as_deref().context("a lease has a downstream key")?;
    let sent = match rides.mutant {
        Some(Mutant::OperatorGuesses) => None,
        // Withdrawn, and not only looked up: its worker may be suspended, and send the text when it wakes.
        _ => rides.outside.withdraw(&reference(downstream_key, found.attempt)).await?,
    };
    match sent {
        Some(receipt) => {
            resolve_step(&rides.pool, &found.key, found.token, step, &receipt).await?;
            decided.resolved.fetch_add(1, Ordering::Relaxed);
        }
        None => {
            release_step(&rides.pool, &found.key, found.token, step, "the gateway has not sent the text, and will not")
                .await?;
            decided.released.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}
