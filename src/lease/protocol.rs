//! The protocol of lease mode: claim, work under a lease, complete; or replay.

use std::fmt::Display;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};
use tokio::time::Instant;

use super::handle::Lease;
use super::options::LeaseOptions;
use super::owner::{LeaseOwner, Won};
use super::unbegun::Unbegun;
use crate::background::caught;
use crate::claim::{CalledAt, Claimed, contend};
use crate::observe::{Failure, call_span, spanned};
use crate::outcome::{Response, decode, encode};
use crate::record::{Claim, Record, StoredSteps, Terms};
use crate::session::{ANSWER_TIME, Opening, Polls, PollsUntil, bounded, in_pooled_transaction};
use crate::{Body, Error, Fingerprint, Key, Misuse, Mode, OnDuplicate, Outcome, observe};

/// A claim is a transaction of a millisecond. A longer wait means a stuck server, or a caller that uses the key in
/// transaction mode.
const CLAIM_WAIT: Duration = Duration::from_secs(1);

/// The answer of [`LeaseOptions::acquire`].
#[allow(clippy::large_enum_variant, reason = "moved once for each claim, which costs two transactions")]
#[derive(Debug)]
#[must_use = "a lease that is dropped is neither completed nor released"]
pub enum Acquired<T> {
    /// This caller has to do the work.
    Owner(LeaseOwner),
    /// An earlier owner has done the work. This is its response.
    Replayed(T),
}

impl LeaseOptions {
    /// Does the work under a lease, stores at most one result for each key, and returns it to every retry.
    ///
    /// `work` runs under a [`Lease`] that renews itself. When the lease is lost, `work` is dropped. When `work` returns
    /// an error, `AtLeastOnce` releases the claim, so that the next caller tries again, and so does `InSteps` unless a
    /// step is in doubt. `AtMostOnce` leaves the key indeterminate, unless the work has called
    /// [`Lease::not_performed`].
    ///
    /// # Errors
    ///
    /// - An error of `work` comes back unchanged. The record keeps its text, as `last_error`.
    /// - Errors because an earlier call has the key: [`KeyReused`](Error::KeyReused), [`InFlight`](Error::InFlight)
    ///   with the rest of the lease, [`Indeterminate`](Error::Indeterminate), [`Exhausted`](Error::Exhausted),
    ///   [`OtherMode`](Error::OtherMode), [`Undecodable`](Error::Undecodable),
    ///   [`Incompatible::UnknownFingerprint`](crate::Incompatible::UnknownFingerprint),
    ///   [`Incompatible::UnknownMode`](crate::Incompatible::UnknownMode). The work did not begin.
    /// - [`InvalidRequest::Body`](crate::InvalidRequest::Body), [`SchemaMissing`](Error::SchemaMissing): the work did
    ///   not begin.
    /// - [`LeaseLost`](Error::LeaseLost), [`Unencodable`](Error::Unencodable): the work has begun, and its result was
    ///   not stored.
    /// - Errors of the database: [`Retryable`](Error::Retryable), [`Database`](Error::Database).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped before the work begins, nothing has happened: if the claim commits all the same, it is
    /// released in the background, and does not count as an attempt. This also holds if the answer of the COMMIT is
    /// lost. Later, the claim lapses: the next caller takes it over, or finds it indeterminate.
    ///
    /// # Panics
    ///
    /// A panic of `work` goes on, after it has ended the attempt as an error of `work` does.
    pub async fn run<T, E, B, F>(self, pool: &PgPool, key: &Key, body: &B, work: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error> + Display,
        F: AsyncFnOnce(&Lease) -> Result<T, E>,
    {
        let span = call_span!("lease.run", self.policy.mode(), key);
        let ended = |result: &Result<_, _>| result.as_ref().map_or_else(Failure::outcome, Outcome::outcome);
        spanned(span, self.work_or_replay(pool, key, body, work), ended).await.map_err(Failure::into_callers)
    }

    async fn work_or_replay<T, E, B, F>(
        self,
        pool: &PgPool,
        key: &Key,
        body: &B,
        work: F,
    ) -> Result<Outcome<T>, Failure<E>>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: Display,
        F: AsyncFnOnce(&Lease) -> Result<T, E>,
    {
        let owner = match self.acquire_unbegun(pool, key, body).await? {
            Acquired::Replayed(response) => return Ok(Outcome::Replayed(response)),
            Acquired::Owner(owner) => owner,
        };
        work_and_complete(owner, work).await.map(Outcome::Performed)
    }

    /// Claims the key and returns the owner of the lease, for work that does not fit into a closure.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), before any work.
    ///
    /// # Panics
    ///
    /// If there is no Tokio runtime, because the renewal is a task. It panics before the claim.
    ///
    /// # Cancellation
    ///
    /// Nothing has happened: if the claim commits all the same, it is released in the background, and does not count as
    /// an attempt. This also holds if the answer of its COMMIT is lost. The release is tried for the length of one
    /// lease. If it does not succeed, or the process ends, the claim lapses.
    pub async fn acquire<T, B>(self, pool: &PgPool, key: &Key, body: &B) -> Result<Acquired<T>, Error>
    where
        T: DeserializeOwned,
        B: Body + ?Sized,
    {
        let mut acquired = self.acquire_unbegun(pool, key, body).await?;
        if let Acquired::Owner(owner) = &mut acquired {
            owner.begin();
        }
        Ok(acquired)
    }

    /// [`acquire`](Self::acquire), for work that [begins](LeaseOwner::begin) later.
    async fn acquire_unbegun<T, B>(self, pool: &PgPool, key: &Key, body: &B) -> Result<Acquired<T>, Error>
    where
        T: DeserializeOwned,
        B: Body + ?Sized,
    {
        let request = if self.stored_request { body.json().transpose()? } else { None };
        let asked = CalledAt::now();
        let mut polls = PollsUntil::new(Instant::now() + self.wait());
        match self.acquire_stored(pool, key, body.fingerprint()?, request.as_deref(), asked, &mut polls).await? {
            Acquired::Owner(owner) => Ok(Acquired::Owner(owner)),
            Acquired::Replayed(stored) => Ok(Acquired::Replayed(decode(&stored)?)),
        }
    }

    /// [`acquire_unbegun`](Self::acquire_unbegun), with the response as it is stored.
    pub(crate) async fn acquire_stored(
        self,
        pool: &PgPool,
        key: &Key,
        fingerprint: Fingerprint,
        request: Option<&[u8]>,
        asked: CalledAt,
        polls: &mut impl Polls,
    ) -> Result<Acquired<Response>, Error> {
        self.check()?;
        if self.stored_request && request.is_none() {
            let problem = "the call has no body to store; give the body itself, and not its fingerprint";
            return Err(Misuse::options(problem));
        }
        let span = call_span!("lease.acquire", self.policy.mode(), key);
        spanned(span, self.claim_when_free(pool, key, fingerprint, request, asked, polls), |acquired| match acquired {
            Ok(Acquired::Owner(_)) => observe::CLAIMED,
            Ok(Acquired::Replayed(_)) => observe::REPLAYED,
            Err(error) => error.outcome(),
        })
        .await
    }

    /// The terms of a claim with these options.
    pub(super) fn terms(&self, fingerprint: Fingerprint, on_duplicate: OnDuplicate) -> Terms {
        Terms {
            mode: self.policy.mode(),
            fingerprint: Some(fingerprint),
            retention: self.retention,
            on_duplicate: Some(on_duplicate),
            lease: Some(self.policy.lease()),
            max_attempts: self.max_attempts,
            trace: self.trace,
        }
    }

    /// The steps that earlier attempts have stored. They are read under the new token, because until the take-over the
    /// earlier owner could store another.
    pub(super) async fn earlier_steps(
        &self,
        conn: &mut PgConnection,
        record: Record<'_>,
        claim: Claim,
    ) -> Result<StoredSteps, Error> {
        if claim.attempt == 1 || self.policy.mode() != Mode::InSteps {
            return Ok(StoredSteps::default());
        }
        Ok(record.steps(conn, claim.token).await?.unwrap_or_default())
    }

    /// The longest time for one try to claim: the pool's own time for a connection, and as much as the statements may
    /// take. A claim that takes longer than its lease is lost before the work begins.
    pub(crate) fn claim_limit(&self, pool: &PgPool) -> Duration {
        let statements = self.policy.lease().clamp(CLAIM_WAIT * 2, ANSWER_TIME);
        pool.options().get_acquire_timeout().saturating_add(statements)
    }

    async fn claim_when_free(
        self,
        pool: &PgPool,
        key: &Key,
        fingerprint: Fingerprint,
        request: Option<&[u8]>,
        mut asked: CalledAt,
        polls: &mut impl Polls,
    ) -> Result<Acquired<Response>, Error> {
        let _ = tokio::runtime::Handle::current();
        let terms = self.terms(fingerprint, OnDuplicate::Wait(CLAIM_WAIT));
        let record = Record { key, deployment: self.deployment };
        let started = Instant::now();
        let (claimed_at, claimed) = loop {
            // Read before the claim is sent, because the owner's deadline must come before the database's.
            let claimed_at = Instant::now();
            let claiming = in_pooled_transaction(pool, Opening::Durable(self.deployment), async |conn| {
                let claim = match contend(conn, record, &terms, &mut asked).await? {
                    Claimed::Won(claim) => claim,
                    Claimed::Replayed(response) => return Ok(Claimed::Replayed(response)),
                };
                if let Some(request) = request {
                    record.store_request(conn, claim.token, request).await?;
                }
                let steps = self.earlier_steps(conn, record, claim).await?;
                let unbegun = Unbegun::of(pool, record, claim.token, self.policy.lease());
                Ok(Claimed::Won(Won { claim, steps, unbegun }))
            });
            let claimed = bounded(self.claim_limit(pool), claiming).await;
            if !matches!(claimed, Err(Error::InFlight { .. })) || !polls.rest().await {
                break (claimed_at, claimed);
            }
        };
        // Once for all polls. A claim that was won is counted when its work ends.
        observe::claimed(terms.mode, key.operation(), started.elapsed());
        match &claimed {
            Ok(Claimed::Won(_)) => {}
            Ok(Claimed::Replayed(_)) => observe::outcome(terms.mode, key.operation(), observe::REPLAYED),
            Err(error) => observe::outcome(terms.mode, key.operation(), error.outcome()),
        }
        Ok(match claimed? {
            Claimed::Won(won) => Acquired::Owner(LeaseOwner::new(self, pool, key, fingerprint, won, claimed_at)),
            Claimed::Replayed(response) => Acquired::Replayed(response),
        })
    }
}

/// Does the work, and stores its result or releases the claim.
pub(super) async fn work_and_complete<T, E>(
    mut owner: LeaseOwner,
    work: impl AsyncFnOnce(&Lease) -> Result<T, E>,
) -> Result<T, Failure<E>>
where
    T: Serialize + DeserializeOwned,
    E: Display,
{
    let started = Instant::now();
    let lease = Lease::clone(&owner);
    // The lease may be lost before the work is polled.
    let working = async {
        owner.begin();
        work(&lease).await
    };
    let worked = lease.unless_lost(caught(working)).await;
    observe::performed(owner.mode(), owner.key().operation(), started.elapsed());
    match worked {
        None => Err(owner.failed(Error::LeaseLost).into()),
        Some(Ok(Ok(response))) => {
            let encoded = encode(&response).map_err(|error| owner.failed(error))?;
            owner.complete_encoded(&encoded).await?;
            Ok(response)
        }
        Some(Ok(Err(error))) => {
            // The alternate form (`#`), because with it anyhow prints the causes too.
            owner.fail(&format!("{error:#}")).await;
            Err(Failure::Perform(error))
        }
        Some(Err(panic)) => {
            owner.fail("the work panicked").await;
            Err(Failure::Panicked(panic))
        }
    }
}
