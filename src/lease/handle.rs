//! The lease as the work sees it, the owner's own clock, and the statements of an owner.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::{PgConnection, PgPool};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::options::LeaseOptions;
use super::step::Memory;
use crate::background::{jittered, unless};
use crate::record::Record;
use crate::session::{ANSWER_TIME, Opening, bounded, in_pooled_transaction};
use crate::{Error, Fingerprint, Key, Misuse, Mode};

/// The lease under which the work runs: its facts, and the steps of the operation. Clones are of the same lease.
///
/// Only the [`LeaseOwner`](super::LeaseOwner) completes or releases the claim. All clones are lost when the claim has
/// ended, and before its release is sent.
///
/// A handler behind a leased layer of the feature `http` takes it with `Lease::of_request`, and with axum as
/// `http::LeasedBody`.
#[derive(Clone, Debug)]
pub struct Lease {
    pub(super) leasing: LeaseOptions,
    pub(super) pool: PgPool,
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    pub(super) token: i64,
    pub(super) attempt: i32,
    pub(super) deadline: Arc<Deadline>,
    pub(super) not_performed: Arc<AtomicBool>,
    /// The steps, as far as this attempt knows them.
    pub(super) steps: Arc<Memory>,
}

impl Lease {
    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// 1 for the first claim, and one more for each take-over of an unfinished operation. A take-over with another body
    /// begins with 1 again. A claim whose work never began does not count.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt.unsigned_abs()
    }

    /// The fencing token. A system that checks it must compare for equality: tokens are random, and have no order.
    #[must_use]
    pub fn token(&self) -> i64 {
        self.token
    }

    /// A key for the next service, the same in every attempt of this operation: 32 hexadecimal digits of a SHA-256 of
    /// the key and the fingerprint. A gateway that deduplicates by it sees one operation, for as long as it remembers
    /// the key. An operator can [look the operation up](crate::operator::Shown::downstream_key) there.
    ///
    /// After the retention, the same key with the same body is a new operation with the same downstream key. A gateway
    /// that remembers keys for longer than the retention would treat it as the earlier operation.
    #[must_use]
    pub fn downstream_key(&self) -> String {
        self.key.downstream(self.fingerprint.as_bytes(), "")
    }

    /// How long the owner may still work, by its own clock. A renewal prolongs it.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.get().map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the lease is lost, or has ended. If it is lost, the work is dropped at its next await. Check this before
    /// each effect in work with several effects and no await between them, and in a task that may outlive the work.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.deadline.is_past()
    }

    /// Declares that the work had no effect, so that a retry is allowed also under `AtMostOnce`. Returns the error:
    /// `return Err(lease.not_performed(error))`.
    ///
    /// **The declaration is for the whole work, and it is final.** Call this only if the work ends with this error, and
    /// not for a first try that another try follows.
    pub fn not_performed<E>(&self, error: E) -> E {
        self.not_performed.store(true, Ordering::Relaxed);
        error
    }

    /// The result of the work, or `None` when the lease is lost. The lease is polled first: a process that was
    /// suspended past its lease must not continue its work when it wakes.
    pub(crate) async fn unless_lost<R>(&self, work: impl Future<Output = R>) -> Option<R> {
        let result = unless(&mut pin!(self.deadline.past()), work).await;
        // The deadline still exists, so the lease has expired: if the renewal had found the claim gone, it would have
        // removed the deadline. The renewal task cannot log this, because it ends with the work.
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
        self.leasing.policy.mode()
    }

    pub(super) fn record(&self) -> Record<'_> {
        Record { key: &self.key, deployment: self.leasing.deployment }
    }

    pub(super) fn durable(&self) -> Opening {
        Opening::Durable(self.leasing.deployment)
    }
}

/// The owner stops when a tenth of the lease is left. This time is for the part of the work that is under way, and for
/// clocks that run at different rates.
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

    /// Ends the claim, which is settled, given up or gone. A task with a clone of the lease must stop.
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
                    // Ends at the deadline or at a change. Then the loop reads the deadline again.
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

/// The number of tries to store a result that fit into one lease, if each try takes its longest time.
const TRIES: u32 = 3;
/// The pause between two tries, as a share of the lease: 2 s for a lease of 40 s.
const PAUSES: u32 = 20;

/// Tries a statement again after an error of the database, for the length of one lease. Otherwise one broken connection
/// would lose the result of work that is done.
pub(super) async fn within_a_lease<R, F>(lease: Duration, statement: impl Fn() -> F) -> Result<R, Error>
where
    // With `AsyncFn`, the future of the caller would not be `Send`.
    F: Future<Output = Result<R, Error>>,
{
    let deadline = Instant::now() + lease;
    loop {
        // A network that drops all packets must not take the time of the next try.
        match bounded((lease / TRIES).min(ANSWER_TIME * 2), statement()).await {
            Ok(value) => return Ok(value),
            // Another try would get the same error.
            Err(error @ (Error::LeaseLost | Error::SchemaMissing { .. } | Error::Misuse(Misuse::Step { .. }))) => {
                return Err(error);
            }
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(jittered(lease / PAUSES)).await,
        }
    }
}

/// Runs a statement that demands the token, in its own transaction. `LeaseLost` if it has changed no row.
pub(super) async fn committed<F>(pool: &PgPool, opening: Opening, statement: F) -> Result<(), Error>
where
    F: AsyncFnOnce(&mut PgConnection) -> Result<bool, Error>,
{
    if in_pooled_transaction(pool, opening, statement).await? { Ok(()) } else { Err(Error::LeaseLost) }
}
