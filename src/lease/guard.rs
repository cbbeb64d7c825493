//! The lease that an owner has, and the ways to end it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::leasing::Leasing;
use super::owner::Owner;
use super::renewal::{Deadline, Renewed, renew};
use super::retry::{committed, within_a_lease};
use super::step::Step;
use super::steps::Steps;
use crate::observe::{call_span, outcome_of, spanned};
use crate::outcome::encode;
use crate::record::{self, Actor, Claim, Record, Response};
use crate::session::{ANSWER, Opening, answered};
use crate::{Error, Fingerprint, Key, Mode, observe};

/// The right and the duty to do the work of one key. It renews itself until it is settled, lost or dropped.
///
/// Settle it with [`complete`](Self::complete) or [`release`](Self::release). **If it is dropped, the claim lapses**,
/// and a warning is logged. The next caller then takes it over, or finds it indeterminate, as the
/// [`Policy`](super::Policy) says. Nothing is undone, because nobody knows whether the work took effect.
#[derive(Debug)]
#[must_use = "a lease that is dropped is neither completed nor released"]
pub struct Lease {
    leasing: Leasing,
    pool: PgPool,
    owner: Owner,
    steps: Steps,
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
        steps: record::Steps,
    ) -> Self {
        let lease = leasing.policy.lease();
        let deadline = Arc::new(Deadline::of(claimed_at, lease));
        let renewed =
            Renewed { pool: pool.clone(), key: key.clone(), deployment: leasing.deployment, token: claim.token, lease };
        let renewal = tokio::spawn({
            let deadline = deadline.clone();
            async move { renew(renewed, claimed_at, &deadline).await }
        });
        let owner = Owner {
            key: key.clone(),
            fingerprint,
            token: claim.token,
            attempt: claim.attempt.unsigned_abs(),
            deadline,
        };
        Self {
            leasing,
            pool: pool.clone(),
            steps: Steps::new(leasing, pool, owner.clone(), steps),
            owner,
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
        self.owner.lost().await;
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

    /// Performs a step in this database, exactly once: `perform` and the step's result commit together. A later attempt
    /// gets the stored result, and does not perform the step again. The transaction is the step's own, with
    /// `synchronous_commit = on`.
    ///
    /// The name is the identity of the step. It must be unique in the operation, and remain the same in later releases:
    /// a step with a new name is performed again. Code between steps runs in each attempt.
    ///
    /// Above READ COMMITTED, a step that is longer than a third of the lease always ends in SQLSTATE 40001, and so do
    /// two steps side by side, because the renewal and each step change the same record. The step holds a connection while
    /// the renewal needs another: a pool of one connection makes a long step lose its lease.
    ///
    /// # Errors
    ///
    /// - An error of `perform` comes back unchanged, and the step's transaction is rolled back. Errors are not stored:
    ///   this attempt or the next may ask for the step again. If a failure is final, return it as a value.
    /// - [`InvalidStep`](Error::InvalidStep): nothing was stored.
    /// - [`Undecodable`](Error::Undecodable): the stored result has another type. [`Unencodable`](Error::Unencodable).
    /// - [`LeaseLost`](Error::LeaseLost): the step was rolled back, or its COMMIT was on the way.
    /// - [`NotInTransaction`](Error::NotInTransaction): `perform` has ended the step's transaction, and nothing was
    ///   stored. What `perform` has written outside the transaction stays.
    /// - Errors of the database. If the COMMIT was not answered, ask for the step again: it returns the result if it
    ///   was stored.
    ///
    /// # Cancellation
    ///
    /// The step is rolled back, or stored. This attempt may ask for it again.
    pub async fn step<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        self.steps.in_database(name, perform).await
    }

    /// Performs a step outside the database, and stores its result. After a crash in its middle a later attempt
    /// performs it again, with the same [`Step::downstream_key`]: **the effect can happen twice**, unless the other
    /// service deduplicates by that key.
    ///
    /// The result is stored by tries for the length of one lease, as in [`complete`](Self::complete).
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step). If the result could not be stored, the effect has happened.
    ///
    /// # Cancellation
    ///
    /// As after a crash: this attempt or a later one performs the step again, unless its result was stored.
    pub async fn step_at_least_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        self.steps.at_least_once(name, perform).await
    }

    /// Performs a step outside the database at most once. Before the effect, the record stores durably that the step
    /// was begun. After a crash in its middle, **nobody knows whether it took effect**: later calls return
    /// [`Indeterminate`](Error::Indeterminate) with the names of all steps in doubt, until an operator finds out about
    /// each and calls [`resolve_step`](crate::operator::resolve_step) or [`release_step`](crate::operator::release_step).
    ///
    /// # Errors
    ///
    /// As [`step_at_least_once`](Self::step_at_least_once), and [`StepInDoubt`](Error::StepInDoubt) if this attempt has
    /// begun it before. An error of `perform` leaves the step in doubt too, unless `perform` declares with
    /// [`Step::not_performed`] that it took no effect.
    ///
    /// # Cancellation
    ///
    /// As after a crash: the step stays in doubt, unless it was not begun, or its result was stored.
    pub async fn step_at_most_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        self.steps.at_most_once(name, perform).await
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
        let (record, token) = (self.record(), self.owner.token);
        let stored = within_a_lease(policy.lease(), || {
            committed(&self.pool, Opening::durable(self.leasing.deployment), async move |conn| {
                record.complete_lease(conn, token, encoded, retention, Actor::Owner).await
            })
        })
        .await;
        self.settled = matches!(stored, Ok(()) | Err(Error::LeaseLost));
        stored.map_err(|error| self.failed(error))?;
        let not_asked_for = self.steps.not_asked_for();
        if !not_asked_for.is_empty() {
            tracing::warn!(
                operation = self.owner.key.operation(),
                steps = ?not_asked_for,
                "an operation completed without asking for steps that an earlier attempt had stored; was a step renamed?"
            );
        }
        let in_doubt = self.steps.in_doubt();
        if !in_doubt.is_empty() {
            tracing::warn!(
                operation = self.owner.key.operation(),
                token = self.owner.token,
                steps = ?in_doubt,
                "an operation completed with steps in doubt, which nobody can settle now; return the error of a step"
            );
        }
        observe::outcome(policy.mode(), self.owner.key.operation(), observe::PERFORMED);
        Ok(())
    }

    /// Releases the claim: the next caller may claim at once, under either policy. Only for work that did nothing, or
    /// whose effect may repeat. The record keeps `reason`.
    ///
    /// Clones of the lease, such as an `IdempotentLease` of the HTTP layer, are lost before the release is
    /// sent. This tries once, for at most the length of one lease, or for a minute if that is shorter. If that fails, the
    /// claim lapses.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancellation
    ///
    /// The claim is released, or lapses.
    pub async fn release(mut self, reason: &str) -> Result<(), Error> {
        // Another owner may work as soon as the release has committed, which this owner may learn later.
        self.owner.deadline.end();
        let giving_up = committed(&self.pool, Opening::Plain, async |conn| {
            self.record().release_lease(conn, self.owner.token, reason).await
        });
        let released = self.for_a_lease(giving_up).await;
        self.settled = released.is_ok() || matches!(released, Err(Error::LeaseLost));
        released
    }

    /// Releases or ends the claim of work that failed, as the policy says. Ignores an error of this statement: the
    /// caller needs the error of the work, and the claim lapses.
    pub(crate) async fn fail(mut self, reason: &str) {
        self.owner.deadline.end();
        observe::outcome(self.leasing.policy.mode(), self.owner.key.operation(), observe::FAILED);
        let may_repeat = self.mode().repeats() || self.not_performed.load(Ordering::Relaxed);
        // A step in doubt must be remembered for the whole retention.
        if may_repeat && self.steps.in_doubt().is_empty() {
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

    /// Stops waiting for a statement after the length of one lease, or after a minute if that is shorter. If the network
    /// drops all packets, the wait would last until TCP gives up, and the claim lapses meanwhile.
    async fn for_a_lease(&self, statement: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
        answered(self.leasing.policy.lease().min(ANSWER * 2), statement).await
    }

    #[cfg(feature = "http")]
    pub(crate) fn steps(&self) -> &Steps {
        &self.steps
    }

    pub(super) fn mode(&self) -> Mode {
        self.leasing.policy.mode()
    }

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
        self.owner.deadline.end();
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
