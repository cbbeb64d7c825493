//! The resumer, which finishes operations whose callers do not come back: its loop, the search for these operations,
//! and the take-over of one operation. A resumer of the HTTP layer shares the search, the take-over, and the end of an
//! attempt.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::time::Duration;
use std::vec;

use serde::Serialize;
use serde::de::DeserializeOwned;
#[cfg(feature = "http")]
use sqlx::PgConnection;
use sqlx::PgPool;
use tokio::time::Instant;

use super::call::LeaseCall;
use super::handle::Lease;
use super::options::LeaseOptions;
use super::owner::LeaseOwner;
use crate::background::{Next, Passes, Shutdown, begin_anywhere, caught};
use crate::claim::Claimed;
use crate::error::Failure;
use crate::limits::is_in;
use crate::observe::{EXHAUSTED, FAILED, PERFORMED};
use crate::outcome::unquoted;
#[cfg(feature = "http")]
use crate::record::Record;
use crate::record::{Candidate, Opening, StoredAs};
use crate::route::check_operation;
use crate::session::{bounded, ended_or_closed, in_pooled_transaction};
use crate::{Error, Incompatible, Misuse, OnDuplicate, observe};

/// The default pause after a search that found nothing. A search is one statement on a small index.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
const INTERVALS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(24 * 60 * 60);

#[track_caller]
pub(crate) fn assert_interval(interval: Duration) {
    assert!(is_in(&INTERVALS, interval), "the interval of a resumer must be between 100 ms and a day");
}

/// Finishes the operations whose callers do not come back. `examples/ride.rs` is a program with a resumer.
#[derive(Clone, Debug)]
pub struct Resumer {
    options: LeaseOptions,
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
    pub fn new(options: LeaseOptions, operation: &str) -> Result<Self, Error> {
        options.resumable_attempts()?;
        check_operation(operation)?;
        Ok(Self { options, operation: operation.to_owned(), interval: INTERVAL })
    }

    /// Sets the pause after a search that found nothing. The default is 10 seconds.
    ///
    /// # Panics
    ///
    /// Panics if the interval is shorter than 100 ms or longer than a day.
    #[must_use]
    #[track_caller]
    pub fn interval(self, interval: Duration) -> Self {
        assert_interval(interval);
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
        let mut passes = Passes::of("resuming an operation", Some(operation), self.interval, shutdown);
        while passes.next().await {
            let pass = async {
                let taken = self.options.take_one(pool, operation, &mut passes.shutdown).await?;
                let Some(taken) = taken else { return Ok(Next::LATER) };
                Ok(match attempt(taken, work.clone()).await {
                    Ok(_) => Next::AtOnce,
                    Err(Failure::Panicked(_)) => {
                        tracing::error!(operation, "a resumed operation panicked, and its next attempt comes later");
                        Next::AfterError
                    }
                    Err(failure) => {
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
        let Some(taken) = self.take_one(pool, operation, &mut Shutdown::Never).await? else { return Ok(None) };
        attempt(taken, work).await.map(Some).map_err(Failure::into_callers)
    }

    async fn take_one(
        self,
        pool: &PgPool,
        operation: &str,
        shutdown: &mut Shutdown<'_>,
    ) -> Result<Option<(LeaseOwner, Vec<u8>)>, Error> {
        let mut search = Search::of(pool, self, operation, StoredAs::Json)?;
        while let Some(candidate) = search.next(shutdown).await? {
            if let Some(taken) = search.take(&candidate, None).await? {
                return Ok(Some(taken));
            }
        }
        Ok(None)
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
}

/// Does the work with the stored request, and stores the response.
async fn attempt<B, T, E, F>((mut owner, request): (LeaseOwner, Vec<u8>), work: F) -> Result<T, Failure<E>>
where
    B: DeserializeOwned,
    T: Serialize + DeserializeOwned,
    E: Display,
    F: AsyncFnOnce(&Lease, B) -> Result<T, E>,
{
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
    lease.count_resumed(worked.as_ref().map_or_else(Failure::outcome, |_| PERFORMED));
    worked
}

impl Lease {
    /// Counts the end of a resumed attempt. If the last permitted attempt has failed, the operation counts as
    /// exhausted. An attempt that an operator has permitted beyond the limit is also the last attempt.
    pub(crate) fn count_resumed(&self, outcome: &'static str) {
        let was_the_last = self.options.max_attempts.is_some_and(|most| self.attempt() >= most.get());
        // If a step is in doubt, the operation is not exhausted, because the operator who settles the step permits
        // another attempt.
        let is_exhausted = outcome == FAILED && was_the_last && self.steps.in_doubt().is_empty();
        observe::resumed(self.key.operation(), if is_exhausted { EXHAUSTED } else { outcome });
    }
}

/// A search for operations to resume.
pub(crate) struct Search<'s> {
    pool: &'s PgPool,
    options: LeaseOptions,
    operation: &'s str,
    stored_as: StoredAs,
    found: vec::IntoIter<Candidate>,
    /// The number of rows before the next page. `None` after the last page.
    skipped: Option<i64>,
}

impl<'s> Search<'s> {
    pub(crate) fn of(
        pool: &'s PgPool,
        options: LeaseOptions,
        operation: &'s str,
        stored_as: StoredAs,
    ) -> Result<Self, Error> {
        check_operation(operation)?;
        Ok(Self { pool, options, operation, stored_as, found: Vec::new().into_iter(), skipped: Some(0) })
    }

    /// Returns the next operation, or `None` after the last operation or a shutdown.
    pub(crate) async fn next(&mut self, shutdown: &mut Shutdown<'_>) -> Result<Option<Candidate>, Error> {
        let LeaseOptions { policy, persistent, resume_after, .. } = self.options;
        let (operation, stored_as, max_attempts) = (self.operation, self.stored_as, self.options.resumable_attempts()?);
        while !shutdown.is_ready().await {
            if let Some(candidate) = self.found.next() {
                return Ok(Some(candidate));
            }
            let Some(skipped) = self.skipped else { break };
            let page = in_pooled_transaction(self.pool, Opening::ALL_ROWS, async |conn| {
                let (mode, after) = (policy.mode(), resume_after);
                Candidate::page(conn, persistent, operation, mode, max_attempts, after, stored_as, skipped).await
            });
            // The search only reads, so a shutdown may cut it off at once.
            let end = shutdown.or_after(self.options.claim_limit(self.pool), Duration::ZERO);
            let (mut found, next) = match ended_or_closed(end, page).await {
                Some(page) => page?,
                None if shutdown.is_ready().await => break,
                None => return Err(Error::Unanswered),
            };
            begin_anywhere(&mut found);
            (self.found, self.skipped) = (found.into_iter(), next);
        }
        Ok(None)
    }

    /// Does a statement on the record of a candidate that is not taken over.
    #[cfg(feature = "http")]
    pub(crate) async fn on_record<R, F>(&self, candidate: &Candidate, statement: F) -> Result<R, Error>
    where
        F: AsyncFnOnce(Record<'_>, &mut PgConnection) -> Result<R, Error>,
    {
        let record = Record { key: &candidate.key, persistent: self.options.persistent };
        let work = in_pooled_transaction(self.pool, Opening::PLAIN, async |conn| statement(record, conn).await);
        bounded(self.options.claim_limit(self.pool), work).await
    }

    /// Takes the operation over if it has not changed since the search. If `stored` is given, the stored request must
    /// also be equal to `stored`. `None` means that the caller has come back, that another resumer was faster, or that
    /// the record does not decode.
    pub(crate) async fn take(
        &self,
        candidate: &Candidate,
        stored: Option<&[u8]>,
    ) -> Result<Option<(LeaseOwner, Vec<u8>)>, Error> {
        match self.take_unchanged(candidate, stored).await {
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
                let (operation, token) = (self.operation, candidate.token);
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
        &self,
        candidate: &Candidate,
        stored: Option<&[u8]>,
    ) -> Result<(LeaseOwner, Vec<u8>), Error> {
        let options = self.options;
        let mut call = LeaseCall::again(options, self.pool, &candidate.key, candidate.fingerprint);
        // This error rolls the claim back if the operation has changed.
        let changed = || Error::InFlight { retry_after: options.resume_after };
        let claimed_at = Instant::now();
        let claiming = in_pooled_transaction(self.pool, Opening::DURABLE, async |conn| {
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
        let (won, request) = bounded(options.claim_limit(self.pool), claiming).await?;
        Ok((call.owner(won, claimed_at), request))
    }
}
