//! The lease that an owner has, and the ways to end it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::leasing::Leasing;
use super::owner::Owner;
use super::policy::Policy;
use super::renewal::{Deadline, Renewed, renew};
use super::settle::committed;
use crate::observe::{call_span, outcome_of, spanned};
use crate::outcome::encode;
use crate::record::{Actor, Claim, Record, Response};
use crate::session::Opening;
use crate::session::jittered;
use crate::{Error, Fingerprint, Key, observe};

/// The number of tries to store a result that fit into one lease, if each try takes its longest time.
const COMPLETION_TRIES: u32 = 3;
/// The pause between two tries, as a share of the lease: 2 s for a lease of 40 s.
const COMPLETION_PAUSES: u32 = 20;

/// The right and the duty to do the work of one key. It renews itself until it is settled, lost or dropped.
///
/// Settle it with [`complete`](Self::complete) or [`release`](Self::release). **If it is dropped, the claim lapses**,
/// and a warning is logged. The next caller then takes it over, or finds it indeterminate, as the [`Policy`] says.
/// Nothing is undone, because nobody knows whether the work took effect.
#[derive(Debug)]
#[must_use = "a lease that is dropped is neither completed nor released"]
pub struct Lease {
    leasing: Leasing,
    pool: PgPool,
    owner: Owner,
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
            Renewed { pool: pool.clone(), key: key.clone(), deployment: leasing.deployment, token: claim.token, lease };
        let renewal = tokio::spawn({
            let deadline = deadline.clone();
            async move { renew(renewed, claimed_at, &deadline).await }
        });
        Self {
            leasing,
            pool: pool.clone(),
            owner: Owner {
                key: key.clone(),
                fingerprint,
                token: claim.token,
                attempt: claim.attempt.unsigned_abs(),
                deadline,
            },
            renewal: renewal.abort_handle(),
            not_performed: AtomicBool::new(false),
            settled: false,
        }
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.owner.key
    }

    /// 1 for the first claim, and one more for each take-over.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.owner.attempt
    }

    /// The fencing token. A system that checks it must compare for equality: tokens are random, and have no order.
    #[must_use]
    pub fn token(&self) -> i64 {
        self.owner.token
    }

    /// A key for the next service, the same in every attempt of this operation: see
    /// [`downstream_key`](super::downstream_key).
    #[must_use]
    pub fn downstream_key(&self) -> String {
        self.owner.downstream_key()
    }

    /// How long the owner may still work, by its own clock. A renewal prolongs it.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.owner.deadline.get().map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the lease is lost. If it is, stop the work at once. Work with several effects should check this before
    /// each effect.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.owner.is_lost()
    }

    /// Waits until the lease is lost.
    pub async fn lost(&self) {
        self.owner.deadline.past().await;
    }

    /// Declares that the work did nothing, so that its error allows a retry under `AtMostOnce` too. Returns the error:
    /// `return Err(lease.not_performed(error))`.
    ///
    /// **The declaration is for the work as a whole, and it is final.** Call this method only if the work ends with
    /// this error. Do not call it for a first try if another try follows.
    pub fn not_performed<E>(&self, error: E) -> E {
        self.not_performed.store(true, Ordering::Relaxed);
        error
    }

    /// Stores the result. Every repeat gets it, for the retention, counted from now.
    ///
    /// The work is done, and one broken connection would lose its result. So after an error of the database this tries
    /// again, for the length of one lease.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if another owner has the claim, or has had it; [`Error::Unencodable`]; errors of the
    /// database. After an error the claim lapses.
    ///
    /// # Cancellation
    ///
    /// The result is stored, or the claim lapses.
    pub fn complete<T>(self, response: &T) -> impl Future<Output = Result<(), Error>> + Send + use<T>
    where
        T: Serialize + DeserializeOwned,
    {
        // Before the first await, because a reference across it would demand `T: Sync`.
        let encoded = encode(response);
        async move { self.complete_encoded(&encoded?).await }
    }

    pub(crate) async fn complete_encoded(self, encoded: &Response) -> Result<(), Error> {
        let span = call_span!("lease.complete", self.leasing.policy.mode(), self.owner.key);
        spanned(span, self.store(encoded), |stored| outcome_of(stored, |()| observe::PERFORMED)).await
    }

    async fn store(mut self, encoded: &Response) -> Result<(), Error> {
        let Leasing { policy, retention, .. } = self.leasing;
        let deadline = Instant::now() + policy.lease();
        // A network that drops all packets must not take the time of the next try.
        let a_try = policy.lease() / COMPLETION_TRIES;
        loop {
            let stored = timeout(
                a_try,
                committed(&self.pool, Opening::durable(self.leasing.deployment), async |conn| {
                    self.record().complete_lease(conn, self.owner.token, encoded, retention, Actor::Owner).await
                }),
            )
            .await;
            match stored {
                Ok(Ok(())) => {
                    self.settled = true;
                    observe::outcome(policy.mode(), self.owner.key.operation(), observe::PERFORMED);
                    return Ok(());
                }
                // Another try would get the same error. A COMMIT whose answer was lost does not lead here: the same
                // token with the same response counts as stored.
                Ok(Err(error @ (Error::LeaseLost | Error::SchemaMissing { .. }))) => {
                    self.settled = matches!(error, Error::LeaseLost);
                    return Err(self.failed(error));
                }
                Ok(Err(error)) if Instant::now() >= deadline => return Err(self.failed(error)),
                Err(_) if Instant::now() >= deadline => {
                    return Err(self.failed(Error::Database(sqlx::Error::PoolTimedOut)));
                }
                _ => tokio::time::sleep(jittered(policy.lease() / COMPLETION_PAUSES)).await,
            }
        }
    }

    /// Releases the claim: the next caller may claim at once, under either policy. Only for work that did nothing, or
    /// whose effect may repeat. The record keeps `reason`.
    ///
    /// This tries once, for at most the length of one lease. If that fails, the claim lapses.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancellation
    ///
    /// The claim is released, or lapses.
    pub async fn release(mut self, reason: &str) -> Result<(), Error> {
        let giving_up = committed(&self.pool, Opening::Plain, async |conn| {
            self.record().release_lease(conn, self.owner.token, reason, Actor::Owner).await
        });
        let released = self.for_a_lease(giving_up).await;
        self.settled = released.is_ok() || matches!(released, Err(Error::LeaseLost));
        released
    }

    /// Releases or ends the claim of work that failed, as the policy says. Ignores an error of this statement: the
    /// caller needs the error of the work, and the claim lapses.
    pub(crate) async fn fail(mut self, reason: &str) {
        observe::outcome(self.leasing.policy.mode(), self.owner.key.operation(), observe::FAILED);
        let may_repeat = matches!(self.leasing.policy, Policy::AtLeastOnce { .. });
        if may_repeat || self.not_performed.load(Ordering::Relaxed) {
            let _ = self.release(reason).await;
            return;
        }
        let retention = self.leasing.retention;
        let lapsing = committed(&self.pool, Opening::durable(self.leasing.deployment), async |conn| {
            self.record().lapse(conn, self.owner.token, reason, retention).await
        });
        let lapsed = self.for_a_lease(lapsing).await;
        self.settled = lapsed.is_ok();
    }

    /// Stops waiting for a statement after the length of one lease. If the network drops all packets, the wait would
    /// last until TCP gives up, and the claim lapses meanwhile.
    async fn for_a_lease(&self, statement: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
        let timed_out = || Err(Error::Database(sqlx::Error::PoolTimedOut));
        timeout(self.leasing.policy.lease(), statement).await.unwrap_or_else(|_| timed_out())
    }

    #[cfg(feature = "http")]
    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    pub(crate) fn failed(&self, error: Error) -> Error {
        observe::failure(self.leasing.policy.mode(), self.owner.key.operation(), &error);
        error
    }

    fn record(&self) -> Record<'_> {
        Record { key: &self.owner.key, deployment: self.leasing.deployment }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewal.abort();
        if !self.settled {
            // An operator can find the record by the token, and the token is not a secret.
            tracing::warn!(
                operation = self.owner.key.operation(),
                token = self.owner.token,
                attempt = self.owner.attempt,
                "a lease was dropped before it was completed or released; its claim lapses"
            );
        }
    }
}
