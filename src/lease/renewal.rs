//! The heartbeat of a lease.

use tokio::time::{Instant, sleep_until};

use super::handle::Lease;
use crate::Error;
use crate::session::{Opening, in_pooled_transaction, or_closed};

/// A renewal that succeeds is followed by the next after a third of the lease, one that fails after a twelfth.
const RENEWALS: u32 = 3;

/// Renews the claim at a third of its lease, until the deadline is past or the claim is gone. If the pool has no free
/// connection or the database is away, tries again as long as there is time.
pub(super) async fn renew(lease: Lease, claimed_at: Instant) {
    let (time, deadline) = (lease.leasing.policy.lease(), &lease.deadline);
    let mut next = claimed_at + time / RENEWALS;
    loop {
        let Some(at) = deadline.get() else { return };
        if at <= Instant::now() {
            // The work was told to stop, so the claim must not be renewed.
            return;
        }
        sleep_until(next.min(at)).await;
        let sent_at = Instant::now();
        match or_closed(at.saturating_duration_since(sent_at), heartbeat(&lease)).await {
            Some(Ok(true)) => {
                next = sent_at + time / RENEWALS;
                deadline.prolong(sent_at, time);
            }
            Some(Ok(false)) => {
                deadline.end();
                return;
            }
            Some(Err(error)) => {
                tracing::warn!(
                    operation = lease.key.operation(),
                    token = lease.token,
                    error = &error as &dyn std::error::Error,
                    "a lease could not be renewed"
                );
                next = Instant::now() + time / (RENEWALS * 4);
            }
            None => return,
        }
    }
}

/// Renews the lease once, on its own connection, and as durably as the claim. If the server lost an acknowledged
/// heartbeat, the lease in the database would end before the owner's deadline.
async fn heartbeat(lease: &Lease) -> Result<bool, Error> {
    in_pooled_transaction(&lease.pool, Opening::durable(lease.leasing.deployment), async |conn| {
        lease.record().heartbeat(conn, lease.token, lease.leasing.policy.lease()).await
    })
    .await
}
