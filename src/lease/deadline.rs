//! The owner's own clock: until when it may work.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// The owner stops when a tenth of the lease is left. This spare time is for the part of the work that is under way,
/// and for clocks that run at different rates.
const SPARE: u32 = 10;

/// The time until which the owner may work, by its own clock. The lease and its renewal task share the deadline.
#[derive(Debug)]
pub(super) struct Deadline {
    at: Mutex<Option<Instant>>,
    changed: Notify,
}

impl Deadline {
    /// The deadline of a claim that was sent at this moment.
    pub(super) fn of(sent_at: Instant, lease: Duration) -> Self {
        Self { at: Mutex::new(Some(end(sent_at, lease))), changed: Notify::new() }
    }

    /// `None` once the claim is known to be gone.
    pub(super) fn get(&self) -> Option<Instant> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A renewal that was sent at this moment has succeeded.
    pub(super) fn prolong(&self, sent_at: Instant, lease: Duration) {
        self.set(Some(end(sent_at, lease)));
    }

    /// Ends it, because the claim is settled, given up or gone. A task that has kept a clone of the lease must stop.
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

    fn set(&self, at: Option<Instant>) {
        {
            let mut current = self.at.lock().unwrap_or_else(PoisonError::into_inner);
            // A renewal that was on its way must not revive a claim that is gone.
            *current = current.and(at);
        }
        self.changed.notify_waiters();
    }
}

fn end(sent_at: Instant, lease: Duration) -> Instant {
    sent_at + lease - lease / SPARE
}
