//! One call in transaction mode: `claim → perform → complete`, or a replay, in the caller's transaction or in one of its own.

use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use crate::claim::{Claimed, contend, look_first};
use crate::observe::Ending;
use crate::outcome::{decode, encode};
use crate::record::{Claim, Record, Response, Terms, Unmet, is_taken, wait_error};
use crate::savepoint::Savepoint;
use crate::transaction::{NotBegun, Opening, Settled, in_own_transaction, in_transaction_to_end};
use crate::{Body, Error, Idempotency, Key, Mode, Outcome, Verdict, observe};

/// On which record, and on which terms.
pub(crate) struct Call<'k> {
    record: Record<'k>,
    terms: Terms,
    ending: &'k Ending,
    options: Idempotency,
}

impl<'k> Call<'k> {
    pub(crate) fn new<B: Body + ?Sized>(
        options: &Idempotency,
        key: &'k Key,
        body: &B,
        ending: &'k Ending,
    ) -> Result<Self, Error> {
        let fingerprint = body.fingerprint()?;
        Ok(Self {
            record: Record { key, prepared: options.prepared },
            terms: Terms {
                mode: Mode::Transaction,
                fingerprint: Some(fingerprint),
                retention: options.retention,
                in_flight: options.in_flight,
                lease: None,
                max_attempts: None,
            },
            ending,
            options: *options,
        })
    }

    /// In the caller's transaction.
    pub(crate) async fn ensure<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        match self.claim(conn).await? {
            Claimed::Replayed(response) => Ok(Outcome::Replayed(decode(&response)?)),
            Claimed::Won(claim) => {
                let (response, encoded) = self.perform(conn, perform).await?;
                self.complete(conn, claim, &encoded).await.map_err(|error| self.failed(error))?;
                Ok(Outcome::Performed(response))
            }
        }
    }

    /// On a connection in no transaction. The outer error says that nothing began; then `perform` is still there.
    pub(crate) async fn ensure_alone<T, E, F>(
        &self,
        conn: &mut PgConnection,
        perform: &mut Option<F>,
    ) -> Result<Result<Outcome<T>, E>, Error>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let Idempotency { mut select_first, mut combined_begin, .. } = self.options;
        let asked = Instant::now();
        // In one loop, because a future holds its parts as often as they stand in it.
        loop {
            if select_first && let Some(replayed) = self.look_first(conn, asked).await {
                return Ok(replayed);
            }
            let started = Instant::now();
            let (opening, claim) = match combined_begin {
                true => {
                    self.record.claim_inline(&self.terms).map(|(claim, sql)| (Opening::Claiming(sql), Some(claim)))?
                }
                false => (Opening::Plain, None),
            };
            let settled = in_transaction_to_end(conn, &opening, async |conn| {
                let claim = match claim {
                    Some(claim) => {
                        self.observe_claim(started);
                        claim
                    }
                    None => match self.claim(conn).await? {
                        Claimed::Won(claim) => claim,
                        Claimed::Replayed(response) => {
                            return Ok(Settled::Open(Outcome::Replayed(decode(&response)?)));
                        }
                    },
                };
                self.perform_to_end(conn, claim, perform).await
            })
            .await;
            match settled {
                Ok(settled) => return Ok(settled),
                Err(NotBegun::Failed(error)) if combined_begin && !is_taken(&error) => {
                    self.observe_claim(started);
                    return Ok(Err(self.failed(wait_error(error, started, self.terms.in_flight)).into()));
                }
                Err(not_begun) if !combined_begin || matches!(not_begun, NotBegun::Foreign) => {
                    return Err(not_begun.into());
                }
                // Taken, most likely by somebody who has long completed; or an error of an earlier statement was in the
                // way. The plain way tells.
                Err(_) => (select_first, combined_begin) = (true, false),
            }
        }
    }

    async fn perform_to_end<T, E, F>(
        &self,
        conn: &mut PgConnection,
        claim: Claim,
        perform: &mut Option<F>,
    ) -> Result<Settled<Outcome<T>>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        // Taken only where a transaction began, which ends the call.
        let perform = perform.take().ok_or(Error::UnknownTransaction)?;
        let (response, encoded) = self.perform(conn, perform).await?;
        let completed = complete_to_end(conn, self.record, claim, &encoded, self.options.combined_commit).await;
        Ok(match completed.map_err(|error| self.failed(error))? {
            Settled::Open(()) => Settled::Open(Outcome::Performed(response)),
            Settled::Committed(()) => Settled::Committed(Outcome::Performed(response)),
        })
    }

    async fn look_first<T, E>(&self, conn: &mut PgConnection, asked: Instant) -> Option<Result<Outcome<T>, E>>
    where
        T: DeserializeOwned,
        E: From<Error>,
    {
        let response = look_first(conn, self.record, &self.terms).await?;
        self.observe_claim(asked);
        Some(decode(&response).map(Outcome::Replayed).map_err(E::from))
    }

    async fn perform<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<(T, Response), E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let started = Instant::now();
        let performed = perform(&mut *conn).await;
        self.observe_perform(started);
        let response = performed?;
        let encoded = encode(&response).map_err(|error| self.failed(error))?;
        Ok((response, encoded))
    }

    /// As [`ensure`](Self::ensure), behind a savepoint.
    pub(crate) async fn ensure_isolated<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        let claim = match self.claim(conn).await? {
            Claimed::Replayed(response) => return Ok(Outcome::Replayed(decode(&response)?)),
            Claimed::Won(claim) => claim,
        };
        let savepoint = Savepoint::set(conn, claim.token).await?;
        let started = Instant::now();
        let performed = perform(&mut *conn).await;
        self.observe_perform(started);
        let settled = match performed {
            Ok(verdict) => {
                self.settle(conn, claim, savepoint, verdict).await.map_err(|error| E::from(self.failed(error)))
            }
            Err(error) => Err(error),
        };
        if settled.is_err() {
            // Where this fails, the transaction is not what the caller is promised: that error counts more.
            self.give_up(conn, claim, savepoint).await?;
        }
        settled
    }

    /// As [`ensure_alone`](Self::ensure_alone), behind a savepoint.
    pub(crate) async fn ensure_isolated_alone<T, E, F>(
        &self,
        conn: &mut PgConnection,
        perform: &mut Option<F>,
    ) -> Result<Result<Outcome<T>, E>, Error>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        if self.options.select_first
            && let Some(replayed) = self.look_first(conn, Instant::now()).await
        {
            return Ok(replayed);
        }
        in_own_transaction(conn, &Opening::Plain, async |conn| {
            let perform = perform.take().ok_or(Error::UnknownTransaction)?;
            self.ensure_isolated(conn, perform).await
        })
        .await
    }

    async fn claim(&self, conn: &mut PgConnection) -> Result<Claimed, Error> {
        let started = Instant::now();
        let claimed = contend(conn, self.record, &self.terms).await;
        self.observe_claim(started);
        claimed.inspect_err(|error| self.ending.tell(error))
    }

    async fn settle<T>(
        &self,
        conn: &mut PgConnection,
        claim: Claim,
        savepoint: Savepoint,
        verdict: Verdict<T>,
    ) -> Result<Outcome<T>, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let (response, undo) = match verdict {
            Verdict::Keep(response) => (response, false),
            Verdict::Undo(response) => (response, true),
        };
        let encoded = encode(&response)?;
        if undo {
            savepoint.undo(conn).await?;
            // Set anew, so that a completion that fails can be undone like everything else.
            let savepoint = Savepoint::set(conn, claim.token).await?;
            self.complete(conn, claim, &encoded).await?;
            savepoint.release(conn).await?;
        } else {
            self.complete(conn, claim, &encoded).await?;
            savepoint.release(conn).await?;
        }
        Ok(Outcome::Performed(response))
    }

    fn observe_claim(&self, started: Instant) {
        observe::claimed(self.terms.mode, self.record.key.operation(), started.elapsed());
    }

    fn observe_perform(&self, started: Instant) {
        observe::performed(self.terms.mode, self.record.key.operation(), started.elapsed());
    }

    fn failed(&self, error: Error) -> Error {
        self.ending.tell(&error);
        error
    }

    /// Leaves the transaction as it was before `perform`, and the key to the next caller.
    async fn give_up(&self, conn: &mut PgConnection, claim: Claim, savepoint: Savepoint) -> Result<(), Error> {
        // The first error may be a stale one, of a statement whose future `perform` has dropped: then nothing was sent.
        if savepoint.undo(conn).await.is_err() {
            savepoint.undo(conn).await?;
        }
        self.record.release(conn, claim).await
    }

    async fn complete(&self, conn: &mut PgConnection, claim: Claim, response: &Response) -> Result<(), Error> {
        met(self.record.complete(conn, claim, response).await)
    }
}

/// Stores the response, and commits in the same message if that is wanted and the response is short enough.
pub(crate) async fn complete_to_end(
    conn: &mut PgConnection,
    record: Record<'_>,
    claim: Claim,
    response: &Response,
    combined_commit: bool,
) -> Result<Settled<()>, Error> {
    if combined_commit && response.fits_inline() {
        met(record.complete_and_commit(conn, claim, response).await)?;
        Ok(Settled::Committed(()))
    } else {
        met(record.complete(conn, claim, response).await)?;
        Ok(Settled::Open(()))
    }
}

/// A completion that met no row, as the error that it is.
fn met(completed: Result<Result<(), Unmet>, Error>) -> Result<(), Error> {
    match completed? {
        Ok(()) => Ok(()),
        Err(Unmet::OutlivedRetention) => Err(Error::OutlivedRetention),
        Err(Unmet::NotInTransaction) => Err(Error::NotInTransaction),
    }
}
