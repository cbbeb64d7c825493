//! Finishes operations whose callers do not come back: the loop, and the take-over of one operation.

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
use crate::session::{Opening, bounded, ended_or_closed, in_pooled_transaction};
use crate::{Error, Incompatible, Misuse, OnDuplicate, observe};

/// The default interval. A search is one statement on a small index.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// As for the janitor.
pub(crate) const INTERVALS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(24 * 60 * 60);

/// Finishes the operations whose callers do not come back. `examples/ride.rs` is a program with a resumer.
#[derive(Clone, Debug)]
pub struct Resumer {
    leasing: LeaseOptions,
    operation: String,
    interval: Duration,
}

impl Resumer {
    /// A resumer for the operations of one name. The callers and the resumer use the same options.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] under `AtMostOnce`, or without [`LeaseOptions::max_attempts`].
    pub fn new(leasing: LeaseOptions, operation: &str) -> Result<Self, Error> {
        leasing.resumable_attempts()?;
        Ok(Self { leasing, operation: operation.to_owned(), interval: INTERVAL })
    }

    /// Sets the pause after a search that found nothing. The default is 10 seconds.
    ///
    /// # Panics
    ///
    /// Under 100 ms or over a day.
    #[must_use]
    #[track_caller]
    pub fn interval(self, interval: Duration) -> Self {
        assert!(is_in(&INTERVALS, interval), "the interval of a resumer must be between 100 ms and a day");
        Self { interval, ..self }
    }

    /// Resumes one operation after the other until `shutdown` is ready. Then it finishes the operation in progress. Run
    /// one in each process of a fleet, or one for all.
    ///
    /// It logs errors and panics, and goes on. After an operation that failed, the next one follows at once. After an
    /// error of the database or a panic, the next try follows at first after a second. A panic of the work ends its
    /// attempt as an error does.
    ///
    /// # Cancellation
    ///
    /// The lease of the operation in progress lapses, as after a crash.
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

/// One attempt to resume an operation.
pub(super) enum Resumed<T, E> {
    /// There is no operation to resume at this moment.
    Nothing,
    Completed(T),
    Failed(Failure<E>),
}

impl LeaseOptions {
    /// Takes over one operation, does the work with the stored request, stores its response, and returns it. `None`
    /// means that there is no operation to resume. An operation can be resumed if
    ///
    /// - its lease has lapsed or was released, and no caller has come back for the time of
    ///   [`resume_after`](Self::resume_after);
    /// - its claim has [stored the request](Self::store_request);
    /// - attempts are left, and no step is in doubt.
    ///
    /// If the caller comes back at the same time, only one of the two does the work. The other one gets
    /// [`Error::InFlight`] or tries another operation.
    ///
    /// If the stored request does not decode into `B`, the error is [`Error::Undecodable`], the operation is released,
    /// and one attempt is used up.
    ///
    /// # Errors
    ///
    /// The errors of [`run`](Self::run). In addition, [`Error::Misuse`] under `AtMostOnce` or without
    /// [`max_attempts`](Self::max_attempts).
    ///
    /// # Cancellation and panics
    ///
    /// As [`run`](Self::run). A [`Resumer`](super::Resumer) does this in a loop, and catches a panic.
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

    /// As [`resume_one`](Self::resume_one), but distinguishes an error of the search from a failed attempt. A shutdown
    /// ends the search, and not an attempt.
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
        // A request whose decoding panics uses up an attempt, too.
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
            // A step in doubt waits for an operator, who then permits another attempt.
            Err(failure) if failure.outcome() == FAILED && self.was_the_last(&lease) => EXHAUSTED,
            Err(failure) => failure.outcome(),
        };
        observe::resumed(operation, outcome);
        Ok(worked.map_or_else(Resumed::Failed, Resumed::Completed))
    }

    /// Whether this attempt was the last that is permitted. An operator's permission ends with its attempt.
    pub(crate) fn was_the_last(&self, lease: &Lease) -> bool {
        self.max_attempts.is_some_and(|most| lease.attempt() >= most.get()) && lease.steps.in_doubt().is_empty()
    }

    /// Whether these options allow to resume operations.
    pub(crate) fn resumable_attempts(&self) -> Result<i32, Error> {
        self.check()?;
        self.check_resumable()?;
        // Work that always fails would be resumed for ever.
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

    /// Operations to resume, without those that the same search has found before. None after a shutdown.
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
        // A read may be cut off at once.
        let end = shutdown.or_after(limit, Duration::ZERO);
        let mut candidates = match ended_or_closed(end, candidates).await {
            Some(found) => found?,
            None if shutdown.is_ready().await => return Ok(Vec::new()),
            None => return Err(Error::Unanswered),
        };
        begin_anywhere(&mut candidates);
        Ok(candidates)
    }

    /// Takes the operation over if it is as it was found, with this stored request if one is given. `None` means that
    /// its caller has come back, or that another resumer was faster.
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
            // A row that was written by hand may not decode. The other candidates must not wait for its repair.
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
        // An error rolls the claim back.
        let changed = || Error::InFlight { retry_after: self.resume_after };
        let claimed_at = Instant::now();
        let claiming = in_pooled_transaction(pool, Opening::Durable(self.deployment), async |conn| {
            let Claimed::Won(claim) = call.claim(conn, OnDuplicate::Reject).await? else { return Err(changed()) };
            // Another attempt or the retention has ended since. In the second case this claim is the first of a new
            // operation.
            if claim.attempt != candidate.attempt + 1 {
                return Err(changed());
            }
            let request = call.record().request(conn, claim.token).await?.ok_or_else(changed)?;
            // After the end of its retention the key may have become a new operation with the same body, and other
            // headers.
            if stored.is_some_and(|stored| stored != request) {
                return Err(changed());
            }
            Ok((call.won(conn, claim).await?, request))
        });
        let (won, request) = bounded(self.claim_limit(pool), claiming).await?;
        Ok((call.owner(won, claimed_at), request))
    }
}
