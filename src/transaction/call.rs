//! The protocol of transaction mode: a call claims the key, runs `perform`, and keeps or undoes the writes of
//! `perform`. If a response is stored, the call replays it instead.

use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{Connection as _, PgConnection, PgPool};

use super::Idempotency;
use crate::claim::{Claimed, contend};
use crate::error::{Failure, sqlstate};
use crate::outcome::{Outcome, StoredResponse, Verdict, decode, encode};
use crate::record::{CalledAt, Claim, Opening, Record, Terms};
use crate::session::{Savepoint, Session, depth, or_prepare_again, roll_back_to};
use crate::{Error, Fingerprint, Key, Misuse, Mode, OnDuplicate};

pub(crate) struct Call<'k> {
    pub(crate) record: Record<'k>,
    pub(crate) terms: Terms,
    /// Whether `run` and the HTTP layer look for a stored response before their BEGIN.
    replay_first: bool,
    /// Whether `perform` runs behind a savepoint.
    isolated: bool,
    /// The time of the call, before its wait for a connection of the pool.
    since: Instant,
}

/// A key that this call has claimed in the open transaction.
pub(crate) struct Won<'k> {
    pub(crate) record: Record<'k>,
    pub(crate) claim: Claim,
    savepoint: Option<Savepoint>,
}

impl<'k> Call<'k> {
    pub(crate) fn new(
        options: &Idempotency,
        key: &'k Key,
        fingerprint: Fingerprint,
        on_duplicate: Option<OnDuplicate>,
        isolated: bool,
    ) -> Self {
        Self {
            record: Record { key, persistent: options.persistent },
            terms: Terms {
                mode: Mode::Transaction,
                fingerprint: Some(fingerprint),
                retention: options.retention,
                on_duplicate,
                lease: None,
                max_attempts: None,
            },
            replay_first: options.replay_first,
            isolated,
            since: Instant::now(),
        }
    }

    /// Sets the time of the call to the arrival of the request. Otherwise, a record could expire while the HTTP layer
    /// reads the body.
    #[cfg(feature = "http")]
    pub(crate) fn made_at(self, since: Instant) -> Self {
        Self { since, ..self }
    }

    pub(super) async fn ensure<T: Serialize + DeserializeOwned, E>(
        &self,
        conn: &mut PgConnection,
        perform: impl AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, Failure<E>>,
    ) -> Result<Outcome<T>, Failure<E>> {
        if !conn.is_in_transaction() {
            return Err(Error::Misuse(Misuse::NotInTransaction).into());
        }
        let claimed = self.claim(conn, None).await;
        let won = match or_prepare_again(conn, claimed).await? {
            Claimed::Won(won) => won,
            Claimed::Replayed(stored) => return Ok(Outcome::Replayed(decode(&stored)?)),
        };
        let performed = match won.perform(conn, perform).await {
            Ok((response, stored)) => won.complete(conn, &stored).await.map(|()| response).map_err(Failure::from),
            Err(error) => Err(error),
        };
        if performed.is_err() {
            // If the undo of an isolated call fails, the transaction is not usable, so the caller gets the error of the
            // undo.
            won.give_up(conn).await?;
        }
        performed.map(Outcome::Performed)
    }

    pub(super) async fn run<T: Serialize + DeserializeOwned, E>(
        &self,
        pool: &PgPool,
        perform: impl AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, Failure<E>>,
    ) -> Result<Outcome<T>, Failure<E>> {
        let mut session = Session::of(pool).await?;
        let ended = async {
            let won = match self.begin(&mut session).await? {
                Claimed::Won(won) => won,
                Claimed::Replayed(stored) => {
                    let response = decode(&stored)?;
                    // A replay does not wait for the end of its transaction.
                    session.send_rollback();
                    return Ok(Outcome::Replayed(response));
                }
            };
            let (response, stored) = won.perform(&mut session, perform).await?;
            won.complete_and_commit(&mut session, &stored).await?;
            Ok(Outcome::Performed(response))
        };
        let ended = ended.await;
        if let Err(failure) = &ended {
            if let Failure::Crate(error) = failure {
                session.note(error);
            }
            // The rollback is awaited, so that an immediate retry finds the key free.
            session.roll_back().await;
        }
        ended
    }

    /// Begins a transaction of the crate and claims the key in it, or finds the stored response.
    ///
    /// If the transaction is older than the BEGIN of this call, the BEGIN began nothing, and the transaction may be
    /// foreign. If the claim fails because the transaction is read only, or because a `set local role` has taken a
    /// privilege away, the transaction may also be foreign. In these cases, the call rolls the transaction back, and
    /// begins again with the check for a foreign transaction.
    pub(crate) async fn begin(&self, session: &mut Session) -> Result<Claimed<Won<'k>>, Error> {
        if self.replay_first
            && let Some(stored) = self.record.select_first(session, &self.terms).await
        {
            return Ok(Claimed::Replayed(stored));
        }
        session.begin(Opening::BEFORE_CLAIM).await?;
        let unchecked_since = session.unchecked_since();
        match self.claim(session, unchecked_since).await {
            Err(error) if unchecked_since.is_some() && may_be_of_a_foreign_transaction(&error) => {
                session.begin(Opening::PLAIN).await?;
                self.claim(session, None).await
            }
            claimed => claimed,
        }
    }

    async fn claim(
        &self,
        conn: &mut PgConnection,
        unchecked_since: Option<Instant>,
    ) -> Result<Claimed<Won<'k>>, Error> {
        let mut asked = CalledAt::since(self.since).in_transaction_since(unchecked_since);
        Ok(match contend(conn, self.record, &self.terms, &mut asked).await? {
            Claimed::Won(claim) => {
                let savepoint = if self.isolated { Some(Savepoint::set(conn, claim.token).await?) } else { None };
                Claimed::Won(Won { record: self.record, claim, savepoint })
            }
            Claimed::Replayed(stored) => Claimed::Replayed(stored),
        })
    }
}

/// Whether a claim may have failed because it ran in a foreign transaction, which other code has begun.
fn may_be_of_a_foreign_transaction(error: &Error) -> bool {
    match error {
        Error::Misuse(Misuse::NotInTransaction) => true,
        Error::Database(cause) => matches!(
            sqlstate(cause).as_deref(),
            Some(sqlstate::READ_ONLY_TRANSACTION | sqlstate::INSUFFICIENT_PRIVILEGE)
        ),
        _ => false,
    }
}

impl Won<'_> {
    /// Runs `perform`, and undoes its writes under `Verdict::Undo`. Returns the response and its stored form.
    async fn perform<T: Serialize + DeserializeOwned, E>(
        &self,
        conn: &mut PgConnection,
        perform: impl AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, Failure<E>>,
    ) -> Result<(T, StoredResponse), Failure<E>> {
        let before = depth(conn);
        let performed = perform(&mut *conn).await;
        if depth(conn) > before {
            // `perform` has forgotten the guard of a nested transaction. The caller's COMMIT would only release the
            // savepoint of this nested transaction.
            roll_back_to(conn, before).await;
            // An error of `perform` comes first.
            performed?;
            return Err(Error::Misuse(Misuse::NestedTransaction).into());
        }
        let verdict = performed?;
        let (Verdict::Keep(response) | Verdict::Undo(response)) = &verdict;
        let stored = encode(response)?;
        if let Verdict::Undo(_) = verdict {
            self.undo(conn).await?;
        }
        let (Verdict::Keep(response) | Verdict::Undo(response)) = verdict;
        Ok((response, stored))
    }

    /// Undoes the writes of `perform`, and keeps the claim. The savepoint stays, so that a completion that fails can
    /// also be undone. Only an isolated call has a savepoint, and only an isolated call undoes.
    async fn undo(&self, conn: &mut PgConnection) -> Result<(), Error> {
        match self.savepoint {
            Some(savepoint) => savepoint.roll_back_to(conn).await,
            None => Ok(()),
        }
    }

    /// After a failure of an isolated call, restores the state of the transaction before `perform`, and releases the
    /// key. Any other call undoes nothing, because its caller has to roll the transaction back.
    async fn give_up(self, conn: &mut PgConnection) -> Result<(), Error> {
        let Some(savepoint) = self.savepoint else { return Ok(()) };
        // `perform` may have dropped the future of an earlier statement. Then the first try may return the error of
        // that statement, without sending the undo.
        if let Err(first) = savepoint.undo(conn).await {
            // If a worker of Citus is lost between the two statements of the undo, the savepoint is gone, and the first
            // error is the cause.
            savepoint.undo(conn).await.map_err(|second| if first.is_transient() { first } else { second })?;
        }
        // On Citus, the undo succeeds even if a worker is lost. The release then returns the error.
        self.record.release_in_transaction(conn, self.claim).await
    }

    /// Stores the response, and releases the savepoint, which is not needed any more.
    async fn complete(&self, conn: &mut PgConnection, response: &StoredResponse) -> Result<(), Error> {
        self.record.complete(conn, self.claim, response).await?;
        match self.savepoint {
            Some(savepoint) => savepoint.release(conn).await,
            None => Ok(()),
        }
    }

    /// Undoes the writes of the handler if `undo` is set, stores the response, and commits. After an error, roll back.
    #[cfg(feature = "http")]
    pub(crate) async fn undo_and_commit(
        &self,
        session: &mut Session,
        response: &StoredResponse,
        undo: bool,
    ) -> Result<(), Error> {
        if undo {
            self.undo(session).await?;
        }
        self.complete_and_commit(session, response).await
    }

    /// Stores the response and commits. The COMMIT also ends the savepoint. After an error, the caller rolls back.
    async fn complete_and_commit(&self, session: &mut Session, response: &StoredResponse) -> Result<(), Error> {
        session.check_depth()?;
        self.record.complete(session, self.claim, response).await?;
        session.commit().await
    }
}
