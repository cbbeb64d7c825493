//! Transactions that the crate begins and ends itself, on connections of a pool. A *foreign* transaction is one that
//! other code has left open on such a connection.
//!
//! The pool pings each connection that is returned to it. The ping sends a queued ROLLBACK. If a statement failed after
//! its future was dropped, the ping gets the error, and the pool closes the connection. So no later call gets the error
//! of an earlier call.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool, Postgres};

use super::nesting::{begin, commit_innermost, depth, queue_rollbacks, roll_back_to};
use crate::error::MayContainError;
#[cfg(feature = "http")]
use crate::error::sqlstate;
#[cfg(feature = "http")]
use crate::record::IS_EXEMPT;
use crate::record::Opening;
use crate::{Error, Misuse};

/// A connection of the pool, with the transaction that the crate may have begun on this connection. If the session is
/// dropped, the transaction is rolled back.
pub(crate) struct Session {
    conn: PoolConnection<Postgres>,
    /// Whether a message with BEGIN or ROLLBACK is on its way or has failed. In this case the server may have a
    /// transaction that sqlx does not count.
    uncounted: bool,
    /// When the BEGIN of the open transaction was sent. `None` if the opening itself checks that this BEGIN began the
    /// transaction.
    unchecked_since: Option<Instant>,
    /// Whether the connection is closed when the session is dropped.
    closes: bool,
}

impl Session {
    pub(crate) async fn of(pool: &PgPool) -> Result<Self, Error> {
        let conn = pool.acquire().await.map_err(Error::of_pool)?;
        let mut session = Self { conn, uncounted: false, unchecked_since: None, closes: false };
        // sqlx still counts a transaction whose guard other code has forgotten. The crate must not even read in such a
        // transaction.
        session.roll_back().await;
        Ok(session)
    }

    pub(crate) async fn begun(pool: &PgPool, opening: Opening) -> Result<Self, Error> {
        let mut session = Self::of(pool).await?;
        session.begin(opening).await?;
        Ok(session)
    }

    /// Begins a transaction.
    ///
    /// If other code has left a transaction open on the connection, this function rolls that transaction back, and
    /// begins again. Such a transaction comes from a forgotten guard or from a raw BEGIN. sqlx counts a transaction
    /// with a forgotten guard, and the opening detects a raw BEGIN.
    pub(crate) async fn begin(&mut self, opening: Opening) -> Result<(), Error> {
        self.roll_back().await;
        self.uncounted = true;
        let begun = match self.send(opening).await {
            Err(error) if opening.is_refused_by_a_foreign_transaction(&error) => {
                self.conn.execute("rollback").await?;
                // After the ROLLBACK no foreign transaction is left, so an error has another cause.
                self.send(if opening.is_checked { opening } else { Opening::PLAIN }).await
            }
            begun => begun,
        };
        begun.map_err(Error::of_statement)?;
        self.uncounted = false;
        Ok(())
    }

    async fn send(&mut self, opening: Opening) -> sqlx::Result<()> {
        self.unchecked_since = (!opening.is_checked).then(Instant::now);
        begin(&mut self.conn, opening.sql).await
    }

    /// When the BEGIN was sent. `None` if the age of the transaction is not needed to show that this BEGIN began the
    /// transaction: see [`Opening::BEFORE_CLAIM`].
    pub(crate) fn unchecked_since(&self) -> Option<Instant> {
        self.unchecked_since
    }

    /// Fails if sqlx would not send a COMMIT for the whole transaction. The cause is a forgotten guard of a nested
    /// transaction, or a nested `begin` that the service's code has dropped while it waited.
    pub(crate) fn check_depth(&self) -> Result<(), Error> {
        match depth(&self.conn) {
            0 => Err(Error::Misuse(Misuse::NotInTransaction)),
            1 => Ok(()),
            _ => Err(Error::Misuse(Misuse::NestedTransaction)),
        }
    }

    /// Commits the transaction. After an error, the caller drops the session or rolls back.
    pub(crate) async fn commit(&mut self) -> Result<(), Error> {
        self.check_depth()?;
        Ok(commit_innermost(&mut self.conn).await?)
    }

    /// Commits a transaction that began as [`Opening::EXEMPT`]. The transaction has no claim, so no completion detects
    /// that the transaction is aborted or has ended. So this method first checks that the transaction is not aborted,
    /// because PostgreSQL answers the COMMIT of an aborted transaction with a ROLLBACK. The method also checks that the
    /// setting of the opening is still there. If the handler has ended the transaction and begun another one, the
    /// setting is gone.
    #[cfg(feature = "http")]
    pub(crate) async fn commit_exempt(&mut self) -> Result<(), Error> {
        self.check_depth()?;
        self.conn.execute(IS_EXEMPT).await.map_err(|error| match sqlstate(&error).as_deref() {
            Some(sqlstate::DIVISION_BY_ZERO | sqlstate::NO_ACTIVE_TRANSACTION) => {
                Error::Misuse(Misuse::NotInTransaction)
            }
            _ => error.into(),
        })?;
        self.commit().await
    }

    /// Closes the connection at the drop of the session, if this error shows that the connection has lost its prepared
    /// statements. sqlx would use their names for as long as the connection lives, and each call would fail.
    pub(crate) fn note(&mut self, error: &Error) {
        self.closes |= error.has_lost_statements();
    }

    /// Sends the ROLLBACK of a transaction that has no writes. The pool's ping reads the answer. If the drop of the
    /// session only queued this ROLLBACK, the transaction would stay open until the runtime polls the pool's task.
    pub(crate) fn send_rollback(&mut self) {
        if queue_rollbacks(&mut self.conn, 0) == 0 {
            return;
        }
        // One poll writes the queued ROLLBACK, unless the socket is full. The poll may read an error, which the pool's
        // ping would then not see.
        let sent = pin!(self.conn.flush()).poll(&mut Context::from_waker(Waker::noop()));
        self.closes |= matches!(sent, Poll::Ready(Err(_)));
    }

    pub(crate) async fn roll_back(&mut self) {
        self.uncounted = true;
        roll_back_to(&mut self.conn, 0).await;
        self.uncounted = false;
    }
}

impl Deref for Session {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.conn
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.conn
    }
}

impl Drop for Session {
    /// Queues a ROLLBACK, which the pool's ping sends. If `drop` closed the connection instead, a service with short
    /// time-outs would collapse, because it has to open each connection again, and a connect takes longer than the
    /// time-out.
    ///
    /// If the future was dropped during BEGIN, or during the ROLLBACK that follows a cancelled ROLLBACK, sqlx counts no
    /// transaction. The next caller would then write into an open transaction, and lose the write. So `drop` queues a
    /// second ROLLBACK: it polls `begin` once, with `rollback` as the statement. One poll is enough, because `begin`
    /// queues its statement before it waits.
    ///
    /// All transactions that sqlx counts are rolled back, because otherwise the pool would get a connection with an
    /// open transaction.
    fn drop(&mut self) {
        if self.closes {
            self.conn.close_on_drop();
        }
        queue_rollbacks(&mut self.conn, 0);
        if self.uncounted {
            let _ = pin!(begin(&mut self.conn, "rollback")).poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

/// Runs `work` in a transaction of its own, which commits if the work returns `Ok`, and is rolled back otherwise.
///
/// # Cancellation
///
/// If the future is dropped, the transaction is rolled back. A COMMIT that was already sent may take effect.
pub(crate) async fn in_pooled_transaction<R, E, W>(pool: &PgPool, opening: Opening, work: W) -> Result<R, E>
where
    E: MayContainError,
    W: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    let mut session = Session::begun(pool, opening).await?;
    let worked = work(&mut session).await;
    match &worked {
        Ok(_) => session.commit().await?,
        Err(error) => {
            error.contained().into_iter().for_each(|error| session.note(error));
            session.roll_back().await;
        }
    }
    worked
}
