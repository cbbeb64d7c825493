//! One call in transaction mode: `claim → perform → complete`, or a replay, in the caller's transaction or in one of its own.

use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::outcome::{decode, encode};
use crate::claim::{Claimed, contend, select_first};
use crate::observe::Ending;
use crate::record::{Claim, Record, Response, Terms};
use crate::session::Savepoint;
use crate::session::{Opening, in_own_transaction};
use crate::{Body, Error, Idempotency, Key, Mode, Outcome, Verdict, observe};

/// On which record, and on which terms.
pub(crate) struct Call<'k> {
    pub(crate) record: Record<'k>,
    pub(crate) terms: Terms,
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
            record: Record { key, deployment: options.deployment },
            terms: Terms {
                mode: Mode::Transaction,
                fingerprint: Some(fingerprint),
                retention: options.retention,
                in_flight: options.in_flight()?,
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
                self.record.complete(conn, claim, &encoded).await.map_err(|error| self.failed(error))?;
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
        if let Some(replayed) = self.select_first(conn).await {
            return Ok(replayed);
        }
        in_own_transaction(conn, Opening::Plain, async |conn| {
            let perform = perform.take().ok_or(Error::UnknownTransaction)?;
            self.ensure(conn, perform).await
        })
        .await
    }

    /// The same call, which looks for a stored response before it begins.
    pub(crate) fn selecting_first(&self) -> Self {
        Self { options: self.options.with_select_first(true), ..*self }
    }

    /// A response to replay, where the options say to look for one before anything is begun.
    pub(crate) async fn select_first<T, E>(&self, conn: &mut PgConnection) -> Option<Result<Outcome<T>, E>>
    where
        T: DeserializeOwned,
        E: From<Error>,
    {
        if !self.options.select_first {
            return None;
        }
        let started = Instant::now();
        let response = select_first(conn, self.record, &self.terms).await?;
        self.observe_claim(started);
        Some(decode(&response).map(Outcome::Replayed).map_err(E::from))
    }

    pub(crate) async fn perform<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<(T, Response), E>
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
        if let Some(replayed) = self.select_first(conn).await {
            return Ok(replayed);
        }
        in_own_transaction(conn, Opening::Plain, async |conn| {
            let perform = perform.take().ok_or(Error::UnknownTransaction)?;
            self.ensure_isolated(conn, perform).await
        })
        .await
    }

    async fn claim(&self, conn: &mut PgConnection) -> Result<Claimed, Error> {
        let started = Instant::now();
        let claimed = contend(conn, self.record, &self.terms, &mut None).await;
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
            self.record.complete(conn, claim, &encoded).await?;
            savepoint.release(conn).await?;
        } else {
            self.record.complete(conn, claim, &encoded).await?;
            savepoint.release(conn).await?;
        }
        Ok(Outcome::Performed(response))
    }

    pub(crate) fn observe_claim(&self, started: Instant) {
        observe::claimed(self.terms.mode, self.record.key.operation(), started.elapsed());
    }

    fn observe_perform(&self, started: Instant) {
        observe::performed(self.terms.mode, self.record.key.operation(), started.elapsed());
    }

    pub(crate) fn failed(&self, error: Error) -> Error {
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
}
