//! The operator: asks the gateway whether a text in doubt was sent, and settles its ride.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::bail;
use demos::outside::reference;
use pg_idempotency::SettleError;
use pg_idempotency::operator::{Shown, unsettled};
use tokio::time::sleep;

use crate::ride::{ATTEMPTS, Rides};

const PAUSE: Duration = Duration::from_millis(200);
const AT_ONCE: u32 = 100;

/// How many texts in doubt were sent and were not.
#[derive(Default)]
pub(crate) struct Decided {
    pub(crate) resolved: i64,
    pub(crate) released: i64,
}

/// Settles each ride with a text in doubt. Ends only with an error.
pub(crate) async fn settle(rides: &Rides, decided: &mut Decided) -> anyhow::Result<Infallible> {
    loop {
        let found = unsettled(&rides.pool, AT_ONCE, Some(ATTEMPTS), None).await?;
        for found in found.into_iter().filter(|found| found.key.operation() == rides.operation) {
            match settle_one(rides, found, decided).await {
                // It was settled meanwhile, or its owner was only slow and has changed it since.
                Err(error) if matches!(error.downcast_ref(), Some(SettleError::Changed)) => {}
                settled => settled?,
            }
        }
        sleep(PAUSE).await;
    }
}

async fn settle_one(rides: &Rides, found: Shown, decided: &mut Decided) -> anyhow::Result<()> {
    // A ride has one step that can be in doubt: the text.
    let Some(step) = found.steps.iter().find(|step| step.in_doubt).cloned() else {
        bail!("a ride has used up its attempts")
    };
    // Looking the text up is not enough: the request of a slow or killed worker may still arrive. After a withdrawal,
    // the gateway refuses it.
    match rides.outside.withdraw(&reference(&step.downstream_key, found.attempt)).await? {
        Some(receipt) => {
            found.step(&step.name).resolve(&rides.pool, &receipt).await?;
            decided.resolved += 1;
        }
        None => {
            let reason = "the gateway has not sent the text, and will not";
            found.step(&step.name).release(&rides.pool, reason).await?;
            decided.released += 1;
        }
    }
    Ok(())
}
