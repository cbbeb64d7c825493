//! A call in lease mode: it claims the key, works under the lease and completes, or it replays the stored response.

use std::borrow::Cow;
use std::fmt::Display;
use std::pin::pin;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::handle::Lease;
use super::options::LeaseOptions;
use super::owner::{LeaseOwner, WonLease};
use super::unbegun::Unbegun;
use crate::claim::{Claimed, contend};
use crate::error::Failure;
use crate::observe::{CLAIMED, REPLAYED, call_span, counted, spanned, timed_claim};
use crate::outcome::{StoredResponse, decode};
use crate::record::{CalledAt, Claim, Opening, Record, StoredSteps, Terms};
use crate::session::{ANSWER_TIME, Polls, PollsUntil, bounded, in_pooled_transaction};
use crate::{Body, Error, Fingerprint, Key, Misuse, Mode, OnDuplicate, Outcome};

/// How long a claim waits for an open transaction that has the key. A claim takes a millisecond. A longer wait means
/// that the server is stuck, or that another caller uses the key in transaction mode.
const CLAIM_WAIT: Duration = Duration::from_secs(1);

/// The result of [`LeaseOptions::acquire`].
#[allow(clippy::large_enum_variant, reason = "moved once for each claim, which costs two transactions")]
#[derive(Debug)]
#[must_use = "a lease that is dropped is neither completed nor released"]
pub enum Acquired<T> {
    /// This caller has to do the work.
    Owner(LeaseOwner),
    /// The stored response of an earlier owner that has done the work.
    Replayed(T),
}

impl LeaseOptions {
    /// Does the work under a lease, stores at most one result for each key, and returns this result to every retry.
    ///
    /// `work` runs under a [`Lease`], which a task in the background renews. If the lease is lost, `work` is dropped.
    /// An error of `work` ends the attempt:
    ///
    /// - Under `AtLeastOnce` and `InSteps`, the claim is released, and the next caller does the work again. But if a
    ///   step is in doubt, the key is indeterminate.
    /// - Under `AtMostOnce`, the key is indeterminate, unless the work has called [`Lease::not_performed`].
    ///
    /// # Errors
    ///
    /// - An error of `work` is returned unchanged. The record keeps the text of the error in the column `last_error`.
    /// - An earlier call has the key, so the work did not begin: [`KeyReused`](Error::KeyReused),
    ///   [`InFlight`](Error::InFlight) with the time after which to call again,
    ///   [`Indeterminate`](Error::Indeterminate), [`Exhausted`](Error::Exhausted), [`OtherMode`](Error::OtherMode),
    ///   [`Undecodable`](Error::Undecodable), [`Incompatible`](crate::Incompatible).
    /// - Other errors before the work begins: [`InvalidRequest::Body`](crate::InvalidRequest::Body),
    ///   [`SchemaMissing`](Error::SchemaMissing), [`Misuse`].
    /// - The work has begun, but its result was not stored: [`LeaseLost`](Error::LeaseLost),
    ///   [`Unencodable`](Error::Unencodable).
    /// - The database failed: [`Retryable`](Error::Retryable), [`Database`](Error::Database),
    ///   [`Unanswered`](Error::Unanswered).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped before the work begins, the call does not count as an attempt: see
    /// [`acquire`](Self::acquire). If the future is dropped after the work has begun, the claim lapses, and the policy
    /// decides what the next caller does.
    ///
    /// # Panics
    ///
    /// A panic of `work` ends the attempt as an error does, and the call then resumes the panic.
    pub async fn run<T, E, B, F>(self, pool: &PgPool, key: &Key, body: &B, work: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error> + Display,
        F: AsyncFnOnce(&Lease) -> Result<T, E>,
    {
        let span = call_span!("lease.run", self.policy.mode(), key);
        let call = async {
            match self.call(pool, key, body)?.acquire(&mut self.polls()).await? {
                Acquired::Replayed(stored) => Ok(Outcome::Replayed(decode(&stored)?)),
                Acquired::Owner(owner) => owner.work(work).await.map(Outcome::Performed),
            }
        };
        let ended = |result: &Result<_, _>| result.as_ref().map_or_else(Failure::outcome, Outcome::outcome);
        spanned(pin!(call.instrument(span)), ended).await.map_err(Failure::into_callers)
    }

    /// Claims the key and returns the owner of the lease, or returns the stored response. Use this function for work
    /// that does not fit into a closure.
    ///
    /// # Errors
    ///
    /// The errors that [`run`](Self::run) returns before the work begins.
    ///
    /// # Panics
    ///
    /// Panics if there is no Tokio runtime, which the renewal needs. The panic comes before the claim.
    ///
    /// # Cancellation
    ///
    /// The work begins only after this call has returned. So if the future is dropped, nothing was performed. If the
    /// claim of a dropped call commits, the crate releases the claim in the background, and the claim does not count as
    /// an attempt. The crate also releases the claim if the answer to its COMMIT is lost. The crate retries the release
    /// for the length of one lease, but at least for 3 seconds. If all tries fail, or the process ends, the claim
    /// lapses.
    pub async fn acquire<T, B>(self, pool: &PgPool, key: &Key, body: &B) -> Result<Acquired<T>, Error>
    where
        T: DeserializeOwned,
        B: Body + ?Sized,
    {
        Ok(match self.call(pool, key, body)?.acquire(&mut self.polls()).await? {
            Acquired::Replayed(stored) => Acquired::Replayed(decode(&stored)?),
            Acquired::Owner(mut owner) => {
                owner.begin();
                Acquired::Owner(owner)
            }
        })
    }

    fn call<'c, B: Body + ?Sized>(self, pool: &'c PgPool, key: &'c Key, body: &B) -> Result<LeaseCall<'c>, Error> {
        let request = if self.stored_request { body.json().transpose()? } else { None };
        LeaseCall::new(self, pool, key, body.fingerprint()?, request.map(Cow::Owned), CalledAt::now())
    }

    fn polls(&self) -> PollsUntil {
        PollsUntil::new(Instant::now() + self.wait())
    }

    /// The longest time for one try to claim: the pool's `acquire_timeout` and the time for the statements. The
    /// statements get the length of the lease, but at least twice `CLAIM_WAIT` and at most `ANSWER_TIME`. A claim that
    /// takes longer than its lease is lost before the work begins.
    pub(crate) fn claim_limit(&self, pool: &PgPool) -> Duration {
        let statements = self.policy.lease().clamp(CLAIM_WAIT * 2, ANSWER_TIME);
        pool.options().get_acquire_timeout().saturating_add(statements)
    }
}

/// One call in lease mode, with the request that its claim stores and the time of the call.
pub(crate) struct LeaseCall<'c> {
    options: LeaseOptions,
    pool: &'c PgPool,
    key: &'c Key,
    fingerprint: Fingerprint,
    request: Option<Cow<'c, [u8]>>,
    asked: CalledAt,
}

impl<'c> LeaseCall<'c> {
    pub(crate) fn new(
        options: LeaseOptions,
        pool: &'c PgPool,
        key: &'c Key,
        fingerprint: Fingerprint,
        request: Option<Cow<'c, [u8]>>,
        asked: CalledAt,
    ) -> Result<Self, Error> {
        options.check()?;
        if options.stored_request && request.is_none() {
            let problem = "the call has no body to store; pass the body itself, and not its fingerprint";
            return Err(Misuse::options(problem));
        }
        Ok(Self { options, pool, key, fingerprint, request, asked })
    }

    /// Makes a call for a resumer. The record already has the request.
    pub(super) fn again(options: LeaseOptions, pool: &'c PgPool, key: &'c Key, fingerprint: Fingerprint) -> Self {
        Self { options, pool, key, fingerprint, request: None, asked: CalledAt::now() }
    }

    /// Claims the key, or finds the stored response. While another caller has the key, this function polls.
    pub(crate) async fn acquire(self, polls: &mut impl Polls) -> Result<Acquired<StoredResponse>, Error> {
        let (mode, operation) = (self.options.policy.mode(), self.key.operation());
        let span = call_span!("lease.acquire", mode, self.key);
        let claim = async { timed_claim(mode, operation, pin!(self.claim_when_free(polls))).await };
        let ended = |acquired: &Result<_, Error>| match acquired {
            Ok(Acquired::Owner(_)) => CLAIMED,
            Ok(Acquired::Replayed(_)) => REPLAYED,
            Err(error) => error.outcome(),
        };
        counted(mode, operation, pin!(claim.instrument(span)), ended).await
    }

    async fn claim_when_free(mut self, polls: &mut impl Polls) -> Result<Acquired<StoredResponse>, Error> {
        let _ = tokio::runtime::Handle::current();
        loop {
            // The clock is read before the claim is sent, because the owner's deadline must come before the end of the
            // lease in the database.
            let claimed_at = Instant::now();
            match bounded(self.options.claim_limit(self.pool), self.claim_once()).await {
                Err(Error::InFlight { .. }) if polls.pause().await => {}
                Err(error) => return Err(error),
                Ok(Claimed::Won(won)) => return Ok(Acquired::Owner(self.owner(won, claimed_at))),
                Ok(Claimed::Replayed(response)) => return Ok(Acquired::Replayed(response)),
            }
        }
    }

    async fn claim_once(&mut self) -> Result<Claimed<WonLease>, Error> {
        in_pooled_transaction(self.pool, Opening::DURABLE, async |conn| {
            let claim = match self.claim(conn, OnDuplicate::Wait(CLAIM_WAIT)).await? {
                Claimed::Won(claim) => claim,
                Claimed::Replayed(response) => return Ok(Claimed::Replayed(response)),
            };
            if let Some(request) = &self.request {
                self.record().store_request(conn, claim.token, request).await?;
            }
            Ok(Claimed::Won(self.won(conn, claim).await?))
        })
        .await
    }

    pub(super) async fn claim(&mut self, conn: &mut PgConnection, on_duplicate: OnDuplicate) -> Result<Claimed, Error> {
        let LeaseOptions { policy, retention, max_attempts, .. } = self.options;
        let terms = Terms {
            mode: policy.mode(),
            fingerprint: Some(self.fingerprint),
            retention,
            on_duplicate: Some(on_duplicate),
            lease: Some(policy.lease()),
            max_attempts,
        };
        contend(conn, self.record(), &terms, &mut self.asked).await
    }

    /// Makes the [`WonLease`] of a claim, right before the claiming transaction commits.
    pub(super) async fn won(&self, conn: &mut PgConnection, claim: Claim) -> Result<WonLease, Error> {
        let policy = self.options.policy;
        // The steps are read under the new token. Before the take-over, the earlier owner could still store a step.
        let steps = if claim.attempt > 1 && policy.mode() == Mode::InSteps {
            self.record().steps(conn, claim.token).await?.unwrap_or_default()
        } else {
            StoredSteps::default()
        };
        Ok(WonLease { claim, steps, unbegun: Unbegun::of(self.pool, self.record(), claim.token, policy.lease()) })
    }

    pub(super) fn owner(&self, won: WonLease, claimed_at: Instant) -> LeaseOwner {
        LeaseOwner::new(self.options, self.pool, self.key, self.fingerprint, won, claimed_at)
    }

    pub(super) fn record(&self) -> Record<'c> {
        Record { key: self.key, persistent: self.options.persistent }
    }
}
