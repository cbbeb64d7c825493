//! Lease mode: effects outside the database, at least once or at most once, by choice.
//!
//! A payment gateway, an SMS, another service cannot share a transaction with their key. So the key is claimed in one
//! transaction, the work is done, and its result is stored in another; between the two, the process may die. Nothing in the
//! world can then tell whether the work took effect, and the crate does not pretend to. You choose, with a [`Policy`], what
//! the next caller does:
//!
//! - [`AtLeastOnce`](Policy::AtLeastOnce) takes a lapsed claim over and does the work again. **The outside effect can happen
//!   twice.** Give the other side [`Lease::downstream_key`], if it dedupes by one, and it sees one operation.
//! - [`AtMostOnce`](Policy::AtMostOnce) never does it again. **The effect can be left unknown**: the key is
//!   [indeterminate](Error::Indeterminate) until somebody finds out and says [`resolve`] or [`release`].
//!
//! Either way at most one result is stored, and a stale owner can neither store nor undo anything: every write demands the
//! fencing token of the claim. Where the effect is in this database, take [`ensure_idempotent`](crate::ensure_idempotent())
//! instead: it is cheaper, and exactly once.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use pg_idempotency::{Error, Key};
//! use pg_idempotency::lease::{Policy, ensure_leased};
//! # struct Gateway;
//! # impl Gateway { async fn charge(&self, _: &str, _: i64) -> std::io::Result<String> { Ok(String::new()) } }
//!
//! # async fn f(pool: sqlx::PgPool, gateway: Gateway, order: &str, cents: i64) -> anyhow::Result<()> {
//! let key = Key::new("shop", "charge", order)?;
//! let policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
//! let receipt = ensure_leased(&pool, &key, &cents, policy, async |lease| -> anyhow::Result<String> {
//!     Ok(gateway.charge(&lease.downstream_key(), cents).await?)
//! })
//! .await?
//! .into_inner();
//! # let _ = receipt; Ok(())
//! # }
//! ```
//!
//! # The lease
//!
//! A claim lasts for the length of its lease, by the database's clock, and renews itself at a third of it while the work
//! runs. The owner has a clock of its own too: counted from before the claim was sent, so that it ends first. Past nine
//! tenths without a renewal the work is dropped at its next await and the call ends in [`Error::LeaseLost`]. That clock
//! stands still while the machine sleeps, and work that does not await is not dropped: the fence alone is certain. Make the
//! lease several times as long as a database outage that you mean to sit out, and as short as you can bear to wait for the
//! next attempt: 40 seconds is usual. A queue that delivers again before the lease has lapsed only buys
//! [`Error::InFlight`]. The renewal is a Tokio task, so lease mode needs Tokio.

mod guard;
mod owner;
mod policy;
mod renewal;

use std::fmt::Display;
use std::future::poll_fn;
use std::num::NonZeroU32;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use tokio::time::Instant;

use crate::claim::{Claimed, contend, observe_claim};
use crate::observe::{Ending, call_span, outcome_of, spanned};
use crate::options::{DEFAULT_RETENTION, RETENTION, WAIT, in_flight_within, within};
use crate::outcome::{decode, encode};
use crate::poll::Polls;
use crate::record::{Actor, Record, Response, Terms};
use crate::transaction::{Opening, in_pooled_transaction};
use crate::{Body, Deployment, Error, Fingerprint, InFlight, InvalidBody, InvalidDuration, Key, Outcome, observe};

pub use guard::Lease;
#[cfg(feature = "http")]
pub(crate) use owner::Owner;
pub use policy::Policy;

/// An operator's statement is sent once: to prepare it would be in vain.
const UNPREPARED: Deployment = Deployment::new().with_prepared_statements(false);

/// Claims are transactions of a millisecond: who waits longer for one waits for a stuck server, or for a caller who uses
/// the key in transaction mode.
const CLAIM_WAIT: Duration = Duration::from_secs(1);

/// How operations are leased: the policy, and how long to remember, retry and wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leasing {
    policy: Policy,
    retention: Duration,
    max_attempts: Option<NonZeroU32>,
    wait_for: Duration,
    deployment: Deployment,
}

/// What [`Leasing::acquire`] gives.
#[allow(clippy::large_enum_variant, reason = "moved once for each claim, which costs two transactions")]
#[derive(Debug)]
#[must_use = "a lease that is dropped lapses unperformed"]
pub enum Acquired<T> {
    /// The right and the duty to do the work.
    Lease(Lease),
    /// An earlier owner did; its response.
    Replayed(T),
}

/// Does the work once for each key, with the default options of [`Leasing::new`].
///
/// # Errors
///
/// As [`Leasing::ensure`], and [`Error::InvalidDuration`] for a lease that makes no sense.
///
/// # Cancellation
///
/// As [`Leasing::ensure`].
pub async fn ensure_leased<T, E, B, F>(
    pool: &PgPool,
    key: &Key,
    body: &B,
    policy: Policy,
    work: F,
) -> Result<Outcome<T>, E>
where
    T: Serialize + DeserializeOwned,
    B: Body + ?Sized,
    E: From<Error> + Display,
    F: AsyncFnOnce(&Lease) -> Result<T, E>,
{
    let leasing = Leasing::new(policy).map_err(Error::from)?;
    leasing.ensure(pool, key, body, work).await
}

/// A key for the next service, the same in every attempt of an operation: 32 hexadecimal digits of a SHA-256 of the key and
/// the fingerprint. A gateway that dedupes by it sees one operation, however many attempts there are; and an operator who
/// looks up what became of an indeterminate one finds it under this key.
///
/// It does not outlive the retention in meaning: the same key with the same body is a new operation then, and derives the
/// same key for a gateway that may remember longer.
///
/// # Errors
///
/// [`InvalidBody`] where the body has no fingerprint.
pub fn downstream_key<B: Body + ?Sized>(key: &Key, body: &B) -> Result<String, InvalidBody> {
    Ok(derive_downstream_key(key, body.fingerprint()?.as_bytes()))
}

/// Says what became of an [indeterminate](Error::Indeterminate) or [exhausted](Error::Exhausted) operation: every repeat
/// gets this response from now on, for `retention`. `token` is the one in that error.
///
/// # Errors
///
/// [`Error::LeaseLost`] where the claim is another one by now, completed, or under a live lease; [`Error::Unencodable`];
/// the database's.
///
/// # Cancellation
///
/// Safe at every point: done, or not.
pub async fn resolve<T: Serialize + DeserializeOwned>(
    pool: &PgPool,
    key: &Key,
    token: i64,
    response: &T,
    retention: Duration,
) -> Result<(), Error> {
    let retention = within("retention", retention, RETENTION)?;
    let encoded = encode(response)?;
    let record = Record { key, deployment: UNPREPARED };
    committed(pool, Opening::Durable, async |conn| {
        record.resolve(conn, token, &encoded, retention, Actor::Operator).await
    })
    .await
}

/// Says that an [indeterminate](Error::Indeterminate) operation did not take effect: the next caller may claim it at once,
/// under either policy. `token` is the one in that error; `reason` is kept for the next operator.
///
/// # Errors
///
/// As [`resolve`].
///
/// # Cancellation
///
/// Safe at every point: done, or not.
pub async fn release(pool: &PgPool, key: &Key, token: i64, reason: &str) -> Result<(), Error> {
    let record = Record { key, deployment: UNPREPARED };
    committed(pool, Opening::Durable, async |conn| record.give_up(conn, token, reason, Actor::Operator).await).await
}

impl Leasing {
    /// A retention of 24 hours, any number of attempts, no waiting.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a lease under 10 ms or over 12 hours.
    pub fn new(policy: Policy) -> Result<Self, InvalidDuration> {
        within("lease", policy.lease(), policy::LEASE)?;
        Ok(Self {
            policy,
            retention: DEFAULT_RETENTION,
            max_attempts: None,
            wait_for: Duration::ZERO,
            deployment: Deployment::new(),
        })
    }

    #[cfg(feature = "http")]
    pub(crate) fn mode(&self) -> crate::Mode {
        self.policy.mode()
    }

    /// How long a result is remembered, counted from the completion; and how long an unfinished claim is, counted from
    /// itself. Past it the key is new.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under twice the lease (a claim must not be forgotten while it is renewed) or over ten years.
    pub const fn with_retention(self, retention: Duration) -> Result<Self, InvalidDuration> {
        let shortest = self.policy.lease().saturating_mul(2);
        match within("retention", retention, shortest..=*RETENTION.end()) {
            Ok(retention) => Ok(Self { retention, ..self }),
            Err(invalid) => Err(invalid),
        }
    }

    /// After how many attempts the next one is refused as [`Error::Exhausted`]: a poison message. Attempts that lapsed
    /// count too, so a few deployments that kill their workers can make a healthy message look like one. To give an
    /// exhausted operation another chance, [forget](crate::operator::forget) it.
    #[must_use]
    pub const fn with_max_attempts(self, max_attempts: NonZeroU32) -> Self {
        Self { max_attempts: Some(max_attempts), ..self }
    }

    /// How long to wait for another owner's result before [`Error::InFlight`]. It polls, with jitter, and holds no
    /// connection between two polls. Zero, the default, does not wait. A wait that is not shorter than the retention is
    /// [`Error::InvalidDuration`] when a call is made.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] over an hour.
    pub const fn with_wait_for(self, wait_for: Duration) -> Result<Self, InvalidDuration> {
        match within("wait", wait_for, Duration::ZERO..=*WAIT.end()) {
            Ok(wait_for) => Ok(Self { wait_for, ..self }),
            Err(invalid) => Err(invalid),
        }
    }

    /// How the database is reached: behind a pooler, for one.
    #[must_use]
    pub const fn with_deployment(self, deployment: Deployment) -> Self {
        Self { deployment, ..self }
    }

    /// Does the work once for each key, and gives every repeat the first result.
    ///
    /// `work` runs under a [`Lease`] that renews itself, and is dropped when that is lost. When it returns an error,
    /// `AtLeastOnce` releases the claim, so that the next caller tries again; `AtMostOnce` leaves it indeterminate, unless
    /// the work has said that nothing happened, by [`Lease::not_performed`].
    ///
    /// # Errors
    ///
    /// - An error of `work` comes back untouched; its text is kept with the record, as `last_error`.
    /// - What the key's record says: [`KeyReused`](Error::KeyReused), [`InFlight`](Error::InFlight) with what is left of the
    ///   lease, [`Indeterminate`](Error::Indeterminate), [`Exhausted`](Error::Exhausted), [`OtherMode`](Error::OtherMode),
    ///   [`Undecodable`](Error::Undecodable), [`UnknownFingerprint`](Error::UnknownFingerprint),
    ///   [`UnknownMode`](Error::UnknownMode). No work was done.
    /// - [`InvalidBody`](Error::InvalidBody), [`SchemaMissing`](Error::SchemaMissing): no work was done.
    /// - [`LeaseLost`](Error::LeaseLost), [`Unencodable`](Error::Unencodable): work was done, or begun, and not stored.
    /// - The database's own: [`Retryable`](Error::Retryable), [`Database`](Error::Database).
    ///
    /// # Cancellation
    ///
    /// Dropped before the claim is committed, nothing has happened. Dropped later, the claim lapses: the next caller takes
    /// it over, or finds it indeterminate.
    pub async fn ensure<T, E, B, F>(self, pool: &PgPool, key: &Key, body: &B, work: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error> + Display,
        F: AsyncFnOnce(&Lease) -> Result<T, E>,
    {
        let ending = Ending::default();
        let span = call_span!("ensure_leased", self.policy.mode(), key);
        let call = async {
            let lease = match self.acquire(pool, key, body).await.inspect_err(|error| ending.tell(error))? {
                Acquired::Replayed(response) => return Ok(Outcome::Replayed(response)),
                Acquired::Lease(lease) => lease,
            };
            let started = Instant::now();
            let worked = unless_lost(&lease, work(&lease)).await;
            observe::performed(self.policy.mode(), key.operation(), started.elapsed());
            match worked {
                None => {
                    let error = lease.failed(Error::LeaseLost);
                    ending.tell(&error);
                    Err(error.into())
                }
                Some(Ok(response)) => {
                    let encoded = encode(&response).map_err(|error| lease.failed(error))?;
                    lease.complete_encoded(&encoded).await.inspect_err(|error| ending.tell(error))?;
                    Ok(Outcome::Performed(response))
                }
                Some(Err(error)) => {
                    // Alternate, because anyhow then tells the causes too.
                    lease.fail(&format!("{error:#}")).await;
                    Err(error)
                }
            }
        };
        spanned(span, call, |result| ending.outcome(result)).await
    }

    /// Claims the key and gives the lease in hand, for work that does not fit a closure.
    ///
    /// # Errors
    ///
    /// As [`ensure`](Self::ensure), before any work.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime, before anything is claimed: the renewal is a task.
    ///
    /// # Cancellation
    ///
    /// Nothing has happened, or the claim was committed and lapses. So it does where its COMMIT's answer is lost.
    pub async fn acquire<T, B>(self, pool: &PgPool, key: &Key, body: &B) -> Result<Acquired<T>, Error>
    where
        T: DeserializeOwned,
        B: Body + ?Sized,
    {
        match self.acquire_stored(pool, key, body.fingerprint()?).await? {
            Acquired::Lease(lease) => Ok(Acquired::Lease(lease)),
            Acquired::Replayed(stored) => Ok(Acquired::Replayed(decode(&stored)?)),
        }
    }

    /// [`acquire`](Self::acquire), with the response as it is stored.
    pub(crate) async fn acquire_stored(
        self,
        pool: &PgPool,
        key: &Key,
        fingerprint: Fingerprint,
    ) -> Result<Acquired<Response>, Error> {
        let span = call_span!("lease.acquire", self.policy.mode(), key);
        spanned(span, self.claim_when_free(pool, key, fingerprint), |acquired| {
            outcome_of(acquired, |acquired| match acquired {
                Acquired::Lease(_) => observe::CLAIMED,
                Acquired::Replayed(_) => observe::REPLAYED,
            })
        })
        .await
    }

    async fn claim_when_free(
        self,
        pool: &PgPool,
        key: &Key,
        fingerprint: Fingerprint,
    ) -> Result<Acquired<Response>, Error> {
        let _ = tokio::runtime::Handle::current();
        in_flight_within(Some(InFlight::Wait(self.wait_for)), self.retention)?;
        let terms = Terms {
            mode: self.policy.mode(),
            fingerprint: Some(fingerprint),
            retention: self.retention,
            in_flight: InFlight::Wait(CLAIM_WAIT),
            lease: Some(self.policy.lease()),
            max_attempts: self.max_attempts,
        };
        let record = Record { key, deployment: self.deployment };
        let started = Instant::now();
        let mut polls = Polls::until(started + self.wait_for);
        let mut asked = None;
        let (claimed_at, claimed) = loop {
            // From before the claim is sent: the owner's clock must run ahead of the database's.
            let claimed_at = Instant::now();
            let claimed = in_pooled_transaction(pool, Opening::Durable, async |conn| {
                contend(conn, record, &terms, &mut asked).await
            })
            .await;
            if !matches!(claimed, Err(Error::InFlight { .. })) || !polls.rest().await {
                break (claimed_at, claimed);
            }
        };
        observe_claim(&terms, key, started.into_std(), claimed.as_ref());
        Ok(match claimed? {
            Claimed::Won(claim) => Acquired::Lease(Lease::new(self, pool, key, fingerprint, claim, claimed_at)),
            Claimed::Replayed(response) => Acquired::Replayed(response),
        })
    }
}

/// The work's outcome, or `None` once the lease is lost. That is asked first: a process that was suspended past its lease
/// must not take another step of the work when it wakes.
pub(crate) async fn unless_lost<R>(lease: &Lease, work: impl Future<Output = R>) -> Option<R> {
    let mut lost = pin!(lease.lost());
    let mut work = pin!(work);
    poll_fn(|context| match lost.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => work.as_mut().poll(context).map(Some),
    })
    .await
}

/// Runs one fenced statement in a transaction of its own.
async fn committed<F>(pool: &PgPool, opening: Opening, statement: F) -> Result<(), Error>
where
    F: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<bool, Error>,
{
    if in_pooled_transaction(pool, opening, statement).await? { Ok(()) } else { Err(Error::LeaseLost) }
}

/// From a fingerprint as it is stored, version and all.
pub(crate) fn derive_downstream_key(key: &Key, fingerprint: &[u8]) -> String {
    let mut hasher = Sha256::new_with_prefix(b"downstream");
    key.hash_into(&mut hasher);
    hasher.update(fingerprint);
    hex::encode(&hasher.finalize()[..16])
}
