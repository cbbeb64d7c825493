//! The resumer, which finishes operations whose callers do not come back: its loop, and the take-over of one operation.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;
use tokio::time::Instant;

use super::call::Call;
use super::handle::Lease;
use super::options::LeaseOptions;
use super::owner::LeaseOwner;
use crate::background::{Next, Passes, Shutdown, begin_anywhere, caught};
use crate::claim::Claimed;
use crate::limits::is_in;
use crate::observe::{EXHAUSTED, FAILED, Failure, PERFORMED};
use crate::outcome::unquoted;
use crate::record::{Candidate, StoredAs};
use crate::route::check_operation;
use crate::session::{Opening, bounded, ended_or_closed, in_pooled_transaction};
use crate::{Error, Incompatible, Misuse, OnDuplicate, observe};

/// The default pause after a search that found nothing. A search is one statement on a small index.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
pub(crate) const INTERVALS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(24 * 60 * 60);

/// Finishes the operations whose callers do not come back. `examples/ride.rs` is a program with a resumer.
#[derive(Clone, Debug)]
pub struct Resumer {
    leasing: LeaseOptions,
    operation: String,
    interval: Duration,
}

impl Resumer {
    /// Creates a resumer for all operations with one name. Give the resumer the same options as the callers. **The
    /// database is the name space of operations**, so the resumer also finds the operations of other services that have
    /// this name.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Misuse`] under `AtMostOnce`, without [`LeaseOptions::max_attempts`], or for an operation that
    /// no [`Key`](crate::Key) can have.
    pub fn new(leasing: LeaseOptions, operation: &str) -> Result<Self, Error> {
        leasing.resumable_attempts()?;
        check_operation(operation)?;
        Ok(Self { leasing, operation: operation.to_owned(), interval: INTERVAL })
    }

    /// Sets the pause after a search that found nothing. The default is 10 seconds.
    ///
    /// # Panics
    ///
    /// Panics if the interval is shorter than 100 ms or longer than a day.
    #[must_use]
    #[track_caller]
    pub fn interval(self, interval: Duration) -> Self {
        assert!(is_in(&INTERVALS, interval), "the interval of a resumer must be between 100 ms and a day");
        Self { interval, ..self }
    }

    /// Resumes one operation after the other until `shutdown` is ready. Then the resumer finishes the operation in
    /// progress, and returns. Run one resumer in each process of a fleet, or one resumer for the whole fleet.
    ///
    /// The resumer logs errors and panics, and goes on. After an operation that failed, the resumer resumes the next
    /// operation at once. After a panic or an error of the database, the resumer pauses for a second. This pause
    /// doubles with each further error, up to the interval. A panic of the work ends the attempt in the same way as an
    /// error of the work.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the lease of the operation in progress lapses, as after a crash.
    pub async fn run<B, T, E, W>(self, pool: &PgPool, shutdown: impl Future<Output = ()> + Send, work: W)
    where
        B: DeserializeOwned,
        T: Serialize + DeserializeOwned,
        E: From<Error> + Display,
        W: AsyncFnOnce(&Lease, B) -> Result<T, E> + Clone,
    {
        let (operation, shutdown) = (self.operation.as_str(), pin!(shutdown));
        let what = "resuming an operation";
        let mut passes = Passes::of(what, Some(operation), self.interval, shutdown);
        while passes.next().await {
            let pass = async {
                Ok(match self.leasing.resume(pool, operation, &mut passes.shutdown, work.clone()).await? {
                    Resumed::Nothing => Next::LATER,
                    Resumed::Completed(_) => Next::AtOnce,
                    Resumed::Failed(Failure::Panicked(_)) => {
                        tracing::error!(operation, "a resumed operation panicked, and its next attempt comes later");
                        Next::AfterError
                    }
                    Resumed::Failed(failure) => {
                        tracing::warn!(
                            operation,
                            error = %format_args!("{:#}", failure.into_callers()),
                            "a resumed operation failed, and its next attempt comes later"
                        );
                        Next::AtOnce
                    }
                })
            };
            let ended = caught(pass).await;
            passes.ended(ended);
        }
    }
}

pub(super) enum Resumed<T, E> {
    /// There is no operation to resume at this moment.
    Nothing,
    Completed(T),
    Failed(Failure<E>),
}

impl LeaseOptions {
    /// Takes over one operation, does the work with the stored request, stores the response, and returns the response.
    /// `None` means that there is no operation to resume. An operation can be resumed if all these conditions hold:
    ///
    /// - The lease of the operation has lapsed, or its claim was released.
    /// - No caller has claimed the operation for the time of [`resume_after`](Self::resume_after).
    /// - The claim has [stored the request](Self::store_request).
    /// - Attempts are left, and no step is in doubt.
    ///
    /// If the caller comes back at the same time, either the caller or the resumer does the work. If the resumer is
    /// faster, the caller gets [`Error::InFlight`]. If the caller is faster, the resumer tries another operation.
    ///
    /// If the stored request does not decode into `B`, the call returns [`Error::Undecodable`]. The operation is then
    /// released, and one attempt is used up.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`run`](Self::run), and [`Error::Misuse`] under `AtMostOnce`, without
    /// [`max_attempts`](Self::max_attempts), or for an operation that no [`Key`](crate::Key) can have.
    ///
    /// # Cancellation and panics
    ///
    /// Cancellation and panics are as for [`run`](Self::run). A [`Resumer`](super::Resumer) resumes operations in a
    /// loop, and catches panics.
    pub async fn resume_one<B, T, E, F>(self, pool: &PgPool, operation: &str, work: F) -> Result<Option<T>, E>
    where
        B: DeserializeOwned,
        T: Serialize + DeserializeOwned,
        E: From<Error> + Display,
        F: AsyncFnOnce(&Lease, B) -> Result<T, E>,
    {
        match self.resume(pool, operation, &mut Shutdown::Never, work).await? {
            Resumed::Nothing => Ok(None),
            Resumed::Completed(response) => Ok(Some(response)),
            Resumed::Failed(failure) => Err(failure.into_callers()),
        }
    }

    /// Does the work of [`resume_one`](Self::resume_one), but distinguishes an error of the search from a failed
    /// attempt. A shutdown ends the search, but not an attempt that has begun.
    pub(super) async fn resume<B, T, E, F>(
        self,
        pool: &PgPool,
        operation: &str,
        shutdown: &mut Shutdown<'_>,
        work: F,
    ) -> Result<Resumed<T, E>, Error>
    where
        B: DeserializeOwned,
        T: Serialize + DeserializeOwned,
        E: Display,
        F: AsyncFnOnce(&Lease, B) -> Result<T, E>,
    {
        let Some((mut owner, request)) = self.take_one(pool, operation, shutdown).await? else {
            return Ok(Resumed::Nothing);
        };
        // The work begins before the decoding, so that a request whose decoding panics also uses up an attempt.
        owner.begin();
        let lease = Lease::clone(&owner);
        let worked = match serde_json::from_slice(&request) {
            Ok(request) => owner.work(async |lease| work(lease, request).await).await,
            Err(error) => {
                let source = unquoted(&error);
                owner.fail(&format!("the stored request does not decode: {source}")).await;
                Err(Failure::Crate(Error::Undecodable { step: None, source: source.into() }))
            }
        };
        let outcome = match &worked {
            Ok(_) => PERFORMED,
            // If a step is in doubt, the operation is not exhausted, because the operator who settles the step permits
            // another attempt.
            Err(failure) if failure.outcome() == FAILED && self.was_the_last(&lease) => EXHAUSTED,
            Err(failure) => failure.outcome(),
        };
        observe::resumed(operation, outcome);
        Ok(worked.map_or_else(Resumed::Failed, Resumed::Completed))
    }

    /// Whether this attempt was the last permitted attempt. An attempt that an operator has permitted beyond the limit
    /// is also the last attempt.
    pub(crate) fn was_the_last(&self, lease: &Lease) -> bool {
        self.max_attempts.is_some_and(|most| lease.attempt() >= most.get()) && lease.steps.in_doubt().is_empty()
    }

    /// Returns the limit of attempts, or an error if operations with these options cannot be resumed.
    pub(crate) fn resumable_attempts(&self) -> Result<i32, Error> {
        self.check()?;
        self.check_resumable()?;
        // Without a limit, work that always fails would be resumed for ever.
        let problem = "the number of attempts is unlimited; set LeaseOptions::max_attempts";
        let most = self.max_attempts.ok_or_else(|| Misuse::options(problem))?;
        Ok(i32::try_from(most.get()).unwrap_or(i32::MAX))
    }

    async fn take_one(
        self,
        pool: &PgPool,
        operation: &str,
        shutdown: &mut Shutdown<'_>,
    ) -> Result<Option<(LeaseOwner, Vec<u8>)>, Error> {
        check_operation(operation)?;
        for candidate in self.candidates(pool, operation, StoredAs::Json, 0, shutdown).await? {
            if shutdown.is_ready().await {
                break;
            }
            if let Some(taken) = self.take(pool, &candidate, None).await? {
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// Searches for operations to resume. Skips the first `skipped` operations, which an earlier search has found.
    /// After a shutdown, the result is empty.
    pub(crate) async fn candidates(
        self,
        pool: &PgPool,
        operation: &str,
        stored_as: StoredAs,
        skipped: i64,
        shutdown: &mut Shutdown<'_>,
    ) -> Result<Vec<Candidate>, Error> {
        let max_attempts = self.resumable_attempts()?;
        let (mode, after) = (self.policy.mode(), self.resume_after);
        let candidates = in_pooled_transaction(pool, Opening::AllRows, async |conn| {
            Candidate::all(conn, self.deployment, operation, mode, max_attempts, after, stored_as, skipped).await
        });
        let limit = self.claim_limit(pool);
        // The search only reads, so a shutdown may cut it off at once.
        let end = shutdown.or_after(limit, Duration::ZERO);
        let mut candidates = match ended_or_closed(end, candidates).await {
            Some(found) => found?,
            None if shutdown.is_ready().await => return Ok(Vec::new()),
            None => return Err(Error::Unanswered),
        };
        begin_anywhere(&mut candidates);
        Ok(candidates)
    }

    /// Takes the operation over if it has not changed since the search. If `stored` is given, the stored request must
    /// also be equal to `stored`. `None` means that the caller has come back, that another resumer was faster, or that
    /// the record does not decode.
    pub(crate) async fn take(
        self,
        pool: &PgPool,
        candidate: &Candidate,
        stored: Option<&[u8]>,
    ) -> Result<Option<(LeaseOwner, Vec<u8>)>, Error> {
        match self.take_unchanged(pool, candidate, stored).await {
            Err(
                Error::KeyReused { .. }
                | Error::InFlight { .. }
                | Error::Indeterminate { .. }
                | Error::Exhausted { .. }
                | Error::OtherMode { .. }
                | Error::Incompatible(Incompatible::UnknownMode { .. })
                | Error::Incompatible(Incompatible::UnknownFingerprint { .. }),
            ) => Ok(None),
            // A row that a person has changed with SQL may not decode. Other candidates must not wait until this row is
            // repaired.
            Err(Error::Database(error @ (sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. }))) => {
                let (operation, token) = (candidate.key.operation(), candidate.token);
                tracing::error!(
                    operation,
                    token,
                    error = &error as &dyn std::error::Error,
                    "a record does not decode, so its operation is not resumed; `unsettled --abandoned-for` lists it"
                );
                Ok(None)
            }
            taken => taken.map(Some),
        }
    }

    async fn take_unchanged(
        self,
        pool: &PgPool,
        candidate: &Candidate,
        stored: Option<&[u8]>,
    ) -> Result<(LeaseOwner, Vec<u8>), Error> {
        let mut call = Call::again(self, pool, &candidate.key, candidate.fingerprint);
        // This error rolls the claim back if the operation has changed.
        let changed = || Error::InFlight { retry_after: self.resume_after };
        let claimed_at = Instant::now();
        let claiming = in_pooled_transaction(pool, Opening::Durable(self.deployment), async |conn| {
            let Claimed::Won(claim) = call.claim(conn, OnDuplicate::Reject).await? else { return Err(changed()) };
            // Since the search, another attempt has ended, or the retention has ended. If the retention has ended, this
            // claim is the first claim of a new operation.
            if claim.attempt != candidate.attempt + 1 {
                return Err(changed());
            }
            let request = call.record().request(conn, claim.token).await?.ok_or_else(changed)?;
            // After the retention, the key may belong to a new operation with the same body but other headers.
            if stored.is_some_and(|stored| stored != request) {
                return Err(changed());
            }
            Ok((call.won(conn, claim).await?, request))
        });
        let (won, request) = bounded(self.claim_limit(pool), claiming).await?;
        Ok((call.owner(won, claimed_at), request))
    }
}
