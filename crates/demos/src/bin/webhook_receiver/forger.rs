//! Deliveries that must leave no trace: forged ones, and genuine ones from another time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::plan::Plan;
use crate::sender::Sender;
use crate::signature::Secret;
use crate::tally::Tally;

pub(crate) const FORGED: usize = 120;
pub(crate) const STALE: usize = 40;

/// Beyond the five minutes of the receiver's tolerance, with room for a slow run.
const OFF: Duration = Duration::from_secs(360);

/// Delivers each under the id of a real event that is still to come.
pub(crate) async fn forge(sender: &Sender, secret: &Secret, plan: &Plan) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let wrong_secret = Secret::new(b"whsec_guessed")?;
    for number in 0..FORGED {
        let now = SystemTime::now();
        let genuine = serde_json::to_vec(&plan.event(number))?;
        let mut event = plan.event(number);
        event.amount += 1_000_000;
        let changed = serde_json::to_vec(&event)?;
        let (body, signature) = match number % 6 {
            0 => (changed.clone(), Some(wrong_secret.sign(&changed, now))),
            // Another's signature on another body, or at another time.
            1 => (changed, Some(secret.sign(&genuine, now))),
            2 => (genuine.clone(), Some(made_younger(&secret.sign(&genuine, now - OFF), now))),
            // The right tag, cut short: it would pass where only the bytes that are there are compared.
            3 => (genuine.clone(), Some(secret.sign(&genuine, now).split_at(32).0.to_owned())),
            4 => (changed, Some("t=,v1=".to_owned())),
            _ => (changed, None),
        };
        tally.count(&sender.deliver(body, signature.as_deref()).await?);
    }
    for number in 0..STALE {
        let now = SystemTime::now();
        let recorded = serde_json::to_vec(&plan.event(number))?;
        let at = if number.is_multiple_of(2) { now - OFF } else { now + OFF };
        tally.count(&sender.deliver(recorded.clone(), Some(&secret.sign(&recorded, at))).await?);
    }
    Ok(tally)
}

/// The same tag under a time of now.
fn made_younger(signature: &str, now: SystemTime) -> String {
    let tag = signature.split_once(',').map_or("", |(_, tag)| tag);
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    format!("t={now},{tag}")
}
