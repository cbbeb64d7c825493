//! The heartbeat of a lease.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::handle::Lease;
use crate::Error;
use crate::session::{ANSWER_TIME, Opening, bounded, in_pooled_transaction};

/// A renewal that succeeds is followed by the next after a third of the lease, one that fails after a twelfth.
const RENEWALS: u32 = 3;
const TRIES: u32 = RENEWALS * 4;

/// Renews the claim at a third of its lease, until the deadline is past or the claim is gone. If the pool has no free
/// connection, lends one that has vanished, or the database is away, tries again as long as there is time.
pub(super) async fn renew(lease: Lease, claimed_at: Instant) {
    let (time, deadline) = (lease.leasing.policy.lease(), &lease.deadline);
    let mut next = claimed_at + time / RENEWALS;
    loop {
        let Some(at) = deadline.get() else { return };
        sleep_until(next.min(at)).await;
        let sent_at = Instant::now();
        let left = at.saturating_duration_since(sent_at);
        if left.is_zero() {
            // The work was told to stop, so the claim must not be renewed.
            return;
        }
        match bounded(longest_try(time, left), heartbeat(&lease)).await {
            Ok(true) => {
                next = sent_at + time / RENEWALS;
                deadline.prolong(sent_at, time);
            }
            Ok(false) => {
                deadline.end();
                return;
            }
            Err(error) => {
                tracing::warn!(
                    operation = lease.key.operation(),
                    token = lease.token,
                    error = &error as &dyn std::error::Error,
                    "a lease could not be renewed"
                );
                // After a try that took all its time, at once.
                next = sent_at + time / TRIES;
            }
        }
    }
}

/// How long a try may take, of the time that is `left` to the owner. The pool may lend a connection that has vanished
/// and gives no answer. If the try is dropped, this connection is closed, and the next try gets another one. So a try
/// takes half of the time, and leaves the rest to the next ones. A server that is only slow has more than a quarter of
/// the lease for the first try. Less than a twelfth would be too short for it. After a minute it is as good as away.
fn longest_try(lease: Duration, left: Duration) -> Duration {
    (left / 2).max(lease / TRIES).min(left).min(ANSWER_TIME * 2)
}

/// Renews the lease once, on its own connection, and as durably as the claim. If the server lost an acknowledged
/// heartbeat, the lease in the database would end before the owner's deadline.
async fn heartbeat(lease: &Lease) -> Result<bool, Error> {
    in_pooled_transaction(&lease.pool, Opening::Durable(lease.leasing.deployment), async |conn| {
        lease.record().heartbeat(conn, lease.token, lease.leasing.policy.lease()).await
    })
    .await
}
