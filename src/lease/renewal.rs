//! The heartbeat of a lease, and the owner's own clock.

use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::handle::Lease;
use crate::Error;
use crate::session::{Opening, in_pooled_transaction, or_closed};

/// The owner stops when a tenth of the lease is left. This spare time is for the part of the work that is under way,
/// and for clocks that run at different rates.
const SPARE: u32 = 10;
/// A renewal that succeeds is followed by the next after a third of the lease, one that fails after a twelfth.
const RENEWALS: u32 = 3;

/// The time until which the owner may work, by its own clock. The lease and its renewal task share the deadline.
#[derive(Debug)]
pub(super) struct Deadline {
    at: Mutex<Option<Instant>>,
    changed: Notify,
}

impl Deadline {
    /// The deadline of a claim or renewal that was sent at this moment.
    pub(super) fn of(sent_at: Instant, lease: Duration) -> Self {
        Self { at: Mutex::new(Some(sent_at + lease - lease / SPARE)), changed: Notify::new() }
    }

    /// `None` once the claim is known to be gone.
    pub(super) fn get(&self) -> Option<Instant> {
        *self.at.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn set(&self, at: Option<Instant>) {
        {
            let mut current = self.at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            // A renewal that was on its way must not revive a claim that is gone.
            *current = current.and(at);
        }
        self.changed.notify_waiters();
    }

    /// Ends it, because the claim is settled or given up. A task that has kept a clone of the lease must stop.
    pub(super) fn end(&self) {
        self.set(None);
    }

    pub(super) fn is_past(&self) -> bool {
        self.get().is_none_or(|at| at <= Instant::now())
    }

    /// Waits until the deadline is past. A renewal moves it.
    pub(super) async fn past(&self) {
        loop {
            let changed = self.changed.notified();
            match self.get() {
                Some(at) if Instant::now() < at => {
                    // The time-out ends the wait, or a change does. Then the loop reads the deadline again.
                    let _ = timeout_at(at, changed).await;
                }
                _ => return,
            }
        }
    }
}

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
                deadline.set(Some(sent_at + time - time / SPARE));
            }
            Some(Ok(false)) => {
                deadline.set(None);
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
