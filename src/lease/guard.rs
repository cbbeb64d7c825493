//! The lease in an owner's hand.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::renewal::{Deadline, Renewed, renew};
use super::{Leasing, Policy, committed, jittered};
use crate::outcome::encode;
use crate::record::{Actor, Claim, Record};
use crate::transaction::Durability;
use crate::{Error, Fingerprint, Key};

/// Between two tries to store a result while the database is away.
const COMPLETION_PAUSE: Duration = Duration::from_millis(200);

/// The right and the duty to do the work of one key. It renews itself until it is settled, lost or dropped.
///
/// Settle it by [`complete`](Self::complete) or [`release`](Self::release). **Dropped, it is left to lapse**, which is logged:
/// the next caller takes it over, or finds it indeterminate, as the [`Policy`] says. Nothing is undone, because nobody knows
/// whether the work took effect.
#[derive(Debug)]
#[must_use = "a lease that is dropped lapses unperformed"]
pub struct Lease {
    leasing: Leasing,
    pool: PgPool,
    key: Key,
    fingerprint: Fingerprint,
    token: i64,
    attempt: u32,
    deadline: Arc<Deadline>,
    renewal: AbortHandle,
    not_performed: AtomicBool,
    settled: bool,
}

impl Lease {
    pub(super) fn new(
        leasing: Leasing,
        pool: &PgPool,
        key: &Key,
        fingerprint: Fingerprint,
        claim: Claim,
        claimed_at: Instant,
    ) -> Self {
        let lease = leasing.policy.lease();
        let deadline = Arc::new(Deadline::of(claimed_at, lease));
        let renewed =
            Renewed { pool: pool.clone(), key: key.clone(), prepared: leasing.prepared, token: claim.token, lease };
        let renewal = tokio::spawn({
            let deadline = deadline.clone();
            async move { renew(renewed, claimed_at, &deadline).await }
        });
        Self {
            leasing,
            pool: pool.clone(),
            key: key.clone(),
            fingerprint,
            token: claim.token,
            attempt: claim.attempt.unsigned_abs(),
            deadline,
            renewal: renewal.abort_handle(),
            not_performed: AtomicBool::new(false),
            settled: false,
        }
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// 1 for the first claim, one more at each take-over.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The fencing token. A system that takes part in the fencing remembers the last one it saw under a key.
    #[must_use]
    pub fn token(&self) -> i64 {
        self.token
    }

    /// A key for the next service, the same in every attempt of this operation: 32 hexadecimal digits of a SHA-256 of the
    /// key and the fingerprint. A gateway that dedupes by it sees one operation, however many attempts there are.
    ///
    /// It does not outlive the retention in meaning: the same key with the same body is a new operation then, and derives
    /// the same key for a gateway that may remember longer.
    #[must_use]
    pub fn downstream_key(&self) -> String {
        let mut hasher = Sha256::new_with_prefix(b"downstream");
        self.key.hash_into(&mut hasher);
        hasher.update(self.fingerprint.as_bytes());
        hasher.finalize().iter().take(16).fold(String::new(), |mut hex, byte| {
            // Writing to a String does not fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// How long the owner may still work, by its own clock, unless a renewal prolongs it.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.get().map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the lease is lost: stop at once. Ask before each effect of work that has several.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.deadline.is_past()
    }

    /// Completes when the lease is lost.
    pub async fn lost(&self) {
        self.deadline.past().await;
    }

    /// Says that the work did nothing, so that an error of it may be retried under `AtMostOnce` too. Gives the error back:
    /// `return Err(lease.not_performed(error))`.
    pub fn not_performed<E>(&self, error: E) -> E {
        self.not_performed.store(true, Ordering::Relaxed);
        error
    }

    /// Stores the result: every repeat gets it, for the retention, counted from now.
    ///
    /// A database that is away is tried again until the lease ends.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] where another owner has the claim, or has had it; [`Error::Unencodable`]; the database's.
    /// After an error the claim is left to lapse.
    ///
    /// # Cancellation
    ///
    /// Stored, or left to lapse.
    pub async fn complete<T: Serialize + DeserializeOwned>(self, response: &T) -> Result<(), Error> {
        let encoded = encode(response)?;
        self.complete_encoded(&encoded).await
    }

    async fn complete_encoded(mut self, encoded: &[u8]) -> Result<(), Error> {
        let retention = self.leasing.retention;
        loop {
            let stored = committed(&self.pool, Durability::Raised, async |conn| {
                self.record().resolve(conn, self.token, encoded, retention, Actor::Owner).await
            })
            .await;
            match stored {
                Err(Error::LeaseLost) => {
                    self.settled = true;
                    return Err(Error::LeaseLost);
                }
                Err(error) if error.is_transient() && !self.is_lost() => {
                    tokio::time::sleep(jittered(COMPLETION_PAUSE)).await;
                }
                stored => {
                    self.settled = stored.is_ok();
                    return stored;
                }
            }
        }
    }

    /// Gives the claim up unperformed: the next caller may claim at once, under either policy. Only for work that did
    /// nothing, or whose effect may repeat. `reason` is kept with the record.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancellation
    ///
    /// Released, or left to lapse.
    pub async fn release(mut self, reason: &str) -> Result<(), Error> {
        let released = committed(&self.pool, Durability::AsItIs, async |conn| {
            self.record().give_up(conn, self.token, reason, Actor::Owner).await
        })
        .await;
        self.settled = released.is_ok() || matches!(released, Err(Error::LeaseLost));
        released
    }

    /// What the policy says about work that failed. The work's own error is the news: if this cannot be said to the
    /// database, the claim lapses, which says the same later.
    pub(super) async fn fail(mut self, reason: &str) {
        let may_repeat = matches!(self.leasing.policy, Policy::AtLeastOnce { .. });
        if may_repeat || self.not_performed.load(Ordering::Relaxed) {
            let _ = self.release(reason).await;
            return;
        }
        let lapsed =
            committed(&self.pool, Durability::AsItIs, async |conn| self.record().lapse(conn, self.token, reason).await)
                .await;
        self.settled = lapsed.is_ok();
    }

    fn record(&self) -> Record<'_> {
        Record { key: &self.key, prepared: self.leasing.prepared }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewal.abort();
        if !self.settled {
            tracing::warn!(key = ?self.key, attempt = self.attempt, "a lease was dropped unsettled and is left to lapse");
        }
    }
}
