//! The protocol of transaction mode: claim, perform, and keep or undo; or replay.

use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{Connection as _, PgConnection, PgPool};

use super::fewest::{claiming, complete_and_chain};
use super::{Idempotency, RoundTrips};
use crate::claim::{Asked, Claimed, contend};
use crate::outcome::{Outcome, Verdict, decode, encode};
use crate::record::{Claim, Record, Terms};
use crate::response::Response;
use crate::session::{Opening, Savepoint, Session};
use crate::{Body, Error, Key, Mode};

/// One call: its record, and the terms of its claim.
pub(crate) struct Call<'k> {
    pub(crate) record: Record<'k>,
    pub(crate) terms: Terms,
    round_trips: RoundTrips,
    /// Whether `perform` runs behind a savepoint.
    isolated: bool,
    /// When the call was made. On a pool it then waits for a connection.
    since: Instant,
}

/// A key that the open transaction holds, by a claim of this call.
pub(crate) struct Won<'k> {
    pub(crate) record: Record<'k>,
    pub(crate) claim: Claim,
    /// The state before `perform`.
    savepoint: Option<Savepoint>,
}

impl<'k> Call<'k> {
    pub(crate) fn new<B: Body + ?Sized>(
        options: &Idempotency,
        key: &'k Key,
        body: &B,
        isolated: bool,
    ) -> Result<Self, Error> {
        Ok(Self {
            record: Record { key, deployment: options.deployment },
            terms: Terms {
                mode: Mode::Transaction,
                fingerprint: Some(body.fingerprint()?),
                retention: options.retention,
                in_flight: options.in_flight()?,
                lease: None,
                max_attempts: None,
            },
            round_trips: options.round_trips,
            isolated,
            since: Instant::now(),
        })
    }

    /// The call was made at this moment: a request is read first.
    #[cfg(feature = "http")]
    pub(crate) fn made_at(self, since: Instant) -> Self {
        Self { since, ..self }
    }

    /// The protocol, in the caller's transaction.
    pub(super) async fn ensure<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        if !conn.is_in_transaction() {
            return Err(Error::NotInTransaction.into());
        }
        let mut won = match self.claim(conn).await? {
            Claimed::Won(won) => won,
            Claimed::Replayed(stored) => return Ok(Outcome::Replayed(decode(&stored)?)),
        };
        let performed = match won.perform(conn, perform).await {
            Ok((response, stored)) => won.complete(conn, &stored).await.map(|()| response).map_err(E::from),
            Err(error) => Err(error),
        };
        if performed.is_err() {
            // If the undo fails, the transaction is not in the promised state, so the caller gets the error of the
            // undo.
            won.give_up(conn).await?;
        }
        performed.map(Outcome::Performed)
    }

    /// The protocol, in a transaction of the crate's own. With fewest round trips the message that begins also claims.
    /// If it finds the key taken, the call looks for a response, and then goes the plain way.
    pub(super) async fn run<T, E, F>(&self, pool: &PgPool, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        let (record, terms) = (self.record, &self.terms);
        let fewest = self.round_trips.are_fewest(record.deployment) && !self.isolated;
        let mut session = Session::of(pool).await?;
        if self.round_trips == RoundTrips::SelectFirst
            && let Some(stored) = record.select_first(session.conn(), terms).await
        {
            return Ok(Outcome::Replayed(decode(&stored)?));
        }
        let (mut tx, claim) = 'begun: {
            if fewest {
                let (claim, opening) = claiming(record, terms)?;
                if let Some(tx) = session.begin(&opening).await? {
                    break 'begun (tx, Some(claim));
                }
                if let Some(stored) = record.select_first(session.conn(), terms).await {
                    return Ok(Outcome::Replayed(decode(&stored)?));
                }
            }
            loop {
                if let Some(tx) = session.begin(&Opening::Plain).await? {
                    break (tx, None);
                }
            }
        };
        let ended = async {
            let mut won = match claim {
                Some(claim) => Won { record, claim, savepoint: None },
                None => match self.claim(&mut tx).await? {
                    Claimed::Won(won) => won,
                    Claimed::Replayed(stored) => return Ok(Outcome::Replayed(decode(&stored)?)),
                },
            };
            let (response, stored) = won.perform(&mut tx, perform).await?;
            if fewest {
                won.complete_and_chain(&mut tx, &stored).await?;
            } else {
                won.store(&mut tx, &stored).await?;
            }
            Ok(Outcome::Performed(response))
        };
        match ended.await {
            // The transaction that is chained to the committed one is empty. The pool ends it.
            Ok(Outcome::Performed(response)) if fewest => Ok(Outcome::Performed(response)),
            Ok(outcome) => {
                tx.commit().await.map_err(Error::from)?;
                session.committed()?;
                Ok(outcome)
            }
            Err(error) => {
                // Awaited, so that an immediate retry finds the key free. A ROLLBACK fails only if the connection is
                // broken, and then the server rolls back. The caller needs the first error.
                let _ = tx.rollback().await;
                Err(error)
            }
        }
    }

    /// Claims the key in the open transaction, or finds the stored response.
    pub(crate) async fn claim(&self, conn: &mut PgConnection) -> Result<Claimed<Won<'k>>, Error> {
        Ok(match contend(conn, self.record, &self.terms, &mut Asked::since(self.since)).await? {
            Claimed::Won(claim) => Claimed::Won(self.won(conn, claim).await?),
            Claimed::Replayed(stored) => Claimed::Replayed(stored),
        })
    }

    /// A key that this call has claimed in the open transaction.
    pub(crate) async fn won(&self, conn: &mut PgConnection, claim: Claim) -> Result<Won<'k>, Error> {
        let savepoint = if self.isolated { Some(Savepoint::set(conn, claim.token).await?) } else { None };
        Ok(Won { record: self.record, claim, savepoint })
    }
}

impl Won<'_> {
    /// Performs, and undoes what `perform` wrote if it says so. Returns the response, and what to store.
    async fn perform<T, E, F>(&mut self, conn: &mut PgConnection, perform: F) -> Result<(T, Response), E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        let verdict = perform(&mut *conn).await?;
        let (Verdict::Keep(response) | Verdict::Undo(response)) = &verdict;
        let stored = encode(response)?;
        if let Verdict::Undo(_) = verdict {
            self.undo(conn).await?;
            // Set anew, so that a completion that fails can be undone too.
            self.savepoint = Some(Savepoint::set(conn, self.claim.token).await?);
        }
        let (Verdict::Keep(response) | Verdict::Undo(response)) = verdict;
        Ok((response, stored))
    }

    /// Undoes what `perform` wrote, and keeps the claim.
    pub(crate) async fn undo(&self, conn: &mut PgConnection) -> Result<(), Error> {
        match self.savepoint {
            Some(savepoint) => savepoint.undo(conn).await,
            None => Ok(()),
        }
    }

    /// Restores the state of the transaction before `perform`, and releases the key for the next caller. Without a
    /// savepoint the caller has to roll the transaction back.
    async fn give_up(self, conn: &mut PgConnection) -> Result<(), Error> {
        let Some(savepoint) = self.savepoint else { return Ok(()) };
        // The first try may return the error of an earlier statement whose future `perform` has dropped. Then the undo
        // itself was not sent.
        if let Err(first) = savepoint.undo(conn).await {
            // If Citus loses a worker between the two halves of the undo, the savepoint is gone, and the first error
            // says why.
            savepoint.undo(conn).await.map_err(|second| if first.is_transient() { first } else { second })?;
        }
        // Citus undoes a savepoint also without a worker that it has lost. Then this statement gets the worker's error.
        self.record.release(conn, self.claim).await
    }

    /// Stores the response. Then the savepoint is not needed.
    async fn complete(&self, conn: &mut PgConnection, response: &Response) -> Result<(), Error> {
        self.store(conn, response).await?;
        match self.savepoint {
            Some(savepoint) => savepoint.release(conn).await,
            None => Ok(()),
        }
    }

    /// Stores the response. The COMMIT that follows ends the savepoint, too.
    pub(crate) async fn store(&self, conn: &mut PgConnection, response: &Response) -> Result<(), Error> {
        self.record.complete(conn, self.claim, response).await
    }

    /// Stores the response and commits, in one message if the response is short. After an error roll back.
    pub(crate) async fn complete_and_chain(&self, conn: &mut PgConnection, response: &Response) -> Result<(), Error> {
        complete_and_chain(conn, self.record, self.claim, response).await
    }
}
