//! The lease as the work sees it, the owner's own clock, and the statements of an owner.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::{PgConnection, PgPool};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::memory::Memory;
use super::options::LeaseOptions;
use crate::background::{jittered, unless};
use crate::record::{Opening, Record};
use crate::session::{ANSWER_TIME, bounded, in_pooled_transaction};
use crate::{Error, Fingerprint, Key, Misuse, Mode};

/// The lease under which the work runs, with its key, its token and the steps of the operation. All clones belong to
/// the same lease.
///
/// Only the [`LeaseOwner`](super::LeaseOwner) completes or releases the claim. When the claim ends,
/// [`is_lost`](Self::is_lost) returns `true` for all clones. If the owner releases the claim, `is_lost` returns `true`
/// already before the release is sent.
///
/// A handler behind a leased layer of the feature `http` gets the lease with `Lease::of_request`, or with axum as
/// `http::LeasedBody`.
#[derive(Clone, Debug)]
pub struct Lease {
    pub(super) options: LeaseOptions,
    pub(super) pool: PgPool,
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    pub(super) token: i64,
    pub(super) attempt: i32,
    pub(super) deadline: Arc<Deadline>,
    pub(super) uses: Arc<Uses>,
    pub(super) steps: Arc<Memory>,
}

/// How the work has used its lease, or a clone of the lease.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// Whether the work has declared that it had no effect.
    pub(super) not_performed: AtomicBool,
    /// Whether the work has called a method of the lease.
    any: AtomicBool,
}

impl Lease {
    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.note_use();
        &self.key
    }

    /// The number of this attempt. The first claim is attempt 1, and each take-over of an unfinished operation adds 1.
    /// A take-over with another body begins with 1 again. A claim whose work never began does not count.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.note_use();
        self.attempt.unsigned_abs()
    }

    /// The fencing token of the claim. A system that checks the token must compare it for equality, because tokens are
    /// random and have no order.
    #[must_use]
    pub fn token(&self) -> i64 {
        self.note_use();
        self.token
    }

    /// Returns a key for the next service. This key is the same in every attempt of the operation, and consists of 32
    /// hexadecimal digits of a SHA-256 of the operation's key and fingerprint. A gateway that deduplicates by this key
    /// sees one operation, for as long as the gateway remembers the key. An operator can [look the operation
    /// up](crate::operator::Shown::downstream_key) in the gateway.
    ///
    /// After the retention, the same key with the same body is a new operation with the same downstream key. A gateway
    /// that remembers keys for longer than the retention would treat the new operation as the earlier one.
    #[must_use]
    pub fn downstream_key(&self) -> String {
        self.note_use();
        self.key.downstream(self.fingerprint.as_bytes(), "")
    }

    /// How long the owner may still work, by its own clock. A renewal prolongs this time.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.note_use();
        self.deadline.get().map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the lease is lost or has ended. If the lease is lost, the work is dropped at its next await. If there is
    /// no await between several effects, check `is_lost` before each effect. A task that may outlive the work must also
    /// check `is_lost` before each effect.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.note_use();
        self.deadline.is_past()
    }

    /// Declares that the work had no effect, so that a retry is allowed also under `AtMostOnce`. Returns the error, so
    /// you can write `return Err(lease.not_performed(error))`.
    ///
    /// **The declaration is for the whole work, and it is final.** Call this method only if the work ends with this
    /// error. Do not call `not_performed` for a failed try if the work then tries again.
    pub fn not_performed<E>(&self, error: E) -> E {
        self.note_use();
        self.uses.not_performed.store(true, Ordering::Relaxed);
        error
    }

    pub(super) fn note_use(&self) {
        self.uses.any.store(true, Ordering::Relaxed);
    }

    /// Whether code has called a method of this lease or of a clone. Before the work begins, the crate itself calls no
    /// such method.
    #[cfg(feature = "http")]
    pub(crate) fn is_used(&self) -> bool {
        self.uses.any.load(Ordering::Relaxed)
    }

    /// The operation of the key. The call is not a use of the lease.
    #[cfg(feature = "http")]
    pub(crate) fn operation(&self) -> &str {
        self.key.operation()
    }

    /// Returns the result of the work, or `None` if the lease is lost. The lease is polled before the work, because a
    /// process that wakes after its lease has ended must not continue the work.
    pub(crate) async fn unless_lost<R>(&self, work: impl Future<Output = R>) -> Option<R> {
        let result = unless(&mut pin!(self.deadline.past()), pin!(work)).await;
        // Only the expiry of the lease is logged here. After an expiry, the deadline is still set. A renewal that finds
        // the claim gone removes the deadline, and nothing is logged here. The renewal task cannot log the expiry,
        // because the task ends with the work.
        if result.is_none() && self.deadline.get().is_some() {
            tracing::warn!(
                operation = self.key.operation(),
                token = self.token,
                "a lease was not renewed in time, so its work was dropped: the pool had no connection for the renewal, \
                 the server did not answer, or the process was paused"
            );
        }
        result
    }

    pub(crate) fn mode(&self) -> Mode {
        self.options.policy.mode()
    }

    pub(super) fn record(&self) -> Record<'_> {
        Record { key: &self.key, persistent: self.options.persistent }
    }
}

/// The owner stops when the lease divided by this number is left. This tenth of the lease is for the part of the work
/// that is under way, and for clocks that run at different rates.
const SPARE_DIVISOR: u32 = 10;

/// The time until which the owner may work, by its own clock. The lease and its renewal task share the deadline.
#[derive(Debug)]
pub(super) struct Deadline {
    at: Mutex<Option<Instant>>,
    changed: Notify,
}

impl Deadline {
    pub(super) fn of(sent_at: Instant, lease: Duration) -> Self {
        Self { at: Mutex::new(Some(end(sent_at, lease))), changed: Notify::new() }
    }

    /// The deadline, or `None` once the claim is known to be gone.
    pub(super) fn get(&self) -> Option<Instant> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn prolong(&self, sent_at: Instant, lease: Duration) {
        self.set(Some(end(sent_at, lease)));
    }

    /// Removes the deadline, because the claim is settled, given up or gone. Tasks with a clone of the lease must stop.
    pub(super) fn end(&self) {
        self.set(None);
    }

    pub(super) fn is_past(&self) -> bool {
        self.get().is_none_or(|at| at <= Instant::now())
    }

    /// Waits until the deadline is past. A renewal moves the deadline.
    pub(super) async fn past(&self) {
        loop {
            let changed = self.changed.notified();
            match self.get() {
                Some(at) if Instant::now() < at => {
                    // The wait ends at the deadline or at a change, and the loop then reads the deadline again.
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
    sent_at + lease - lease / SPARE_DIVISOR
}

/// A try of a statement may take the [`time_to_end`] divided by this number. So this many tries have time even if each
/// of them takes its longest time.
const TRY_DIVISOR: u32 = 3;
/// The longest pause between two tries is the [`time_to_end`] divided by this number. For a lease of 40 s, this is 2 s.
const PAUSE_DIVISOR: u32 = 20;

/// The shortest [`time_to_end`]. Each of its tries then has a second, because the server may be busy.
const SHORTEST_TIME_TO_END: Duration = Duration::from_secs(3);

/// The time for the statements that end a claim or a step: the length of the lease, but at least
/// [`SHORTEST_TIME_TO_END`]. Such a statement may come after the end of the lease, because the statement requires the
/// token.
pub(super) fn time_to_end(lease: Duration) -> Duration {
    lease.max(SHORTEST_TIME_TO_END)
}

/// Runs a statement, and tries again after an error of the database, for the [`time_to_end`]. Without a second try, one
/// broken connection would lose the result of finished work.
pub(super) async fn within_a_lease<R, F>(lease: Duration, statement: impl Fn() -> F) -> Result<R, Error>
where
    // With `AsyncFn`, the future of the caller would not be `Send`.
    F: Future<Output = Result<R, Error>>,
{
    let limit = time_to_end(lease);
    let deadline = Instant::now() + limit;
    loop {
        // Each try has a limit, because a network that drops all packets must not use up the time of the next try.
        match bounded((limit / TRY_DIVISOR).min(ANSWER_TIME * 2), statement()).await {
            Ok(value) => return Ok(value),
            // Another try would get the same error.
            Err(error @ (Error::LeaseLost | Error::SchemaMissing { .. } | Error::Misuse(Misuse::Step { .. }))) => {
                return Err(error);
            }
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(jittered(limit / PAUSE_DIVISOR)).await,
        }
    }
}

/// Runs a statement that requires the token, in a transaction of its own. Returns `LeaseLost` if the statement has
/// changed no row.
pub(super) async fn committed<F>(pool: &PgPool, opening: Opening, statement: F) -> Result<(), Error>
where
    F: AsyncFnOnce(&mut PgConnection) -> Result<bool, Error>,
{
    if in_pooled_transaction(pool, opening, statement).await? { Ok(()) } else { Err(Error::LeaseLost) }
}
