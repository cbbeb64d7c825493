//! Transactions that the crate begins and ends itself, on connections of a pool.
//!
//! A [`Session`] has the connection, and [`begin`](Session::begin) returns sqlx's own transaction, which borrows it. So
//! the transaction is dropped first, and has queued its ROLLBACK when the session gives the connection back. The pool
//! pings each connection that comes back. This sends the ROLLBACK, and closes a connection on which a statement whose
//! future was dropped has failed. So a connection of the pool has no error of an earlier statement.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool, PgTransaction, Postgres};

use super::opening::{Begun, Opening};
use crate::Error;
use crate::error::sqlstate;

/// How often one call meets a foreign transaction before it gives up. Each forgotten guard of sqlx on the connection
/// counts once.
pub(super) const FOREIGN_TRANSACTIONS: usize = 3;

/// Commits, and begins an empty transaction, because sqlx still counts one.
pub(crate) const COMMIT_AND_CHAIN: &str = "commit and chain";

/// A connection of the pool on which the crate begins a transaction.
pub(crate) struct Session {
    conn: PoolConnection<Postgres>,
    /// A message with BEGIN is on its way, or has failed.
    beginning: bool,
    /// How many foreign transactions the connection had.
    foreign: usize,
}

impl Session {
    pub(crate) async fn of(pool: &PgPool) -> Result<Self, Error> {
        Ok(Self::on(pool.acquire().await?))
    }

    pub(super) fn on(conn: PoolConnection<Postgres>) -> Self {
        Self { conn, beginning: false, foreign: 0 }
    }

    /// The connection, before a transaction begins.
    pub(crate) fn conn(&mut self) -> &mut PgConnection {
        &mut self.conn
    }

    /// Begins a transaction. `None` means that no transaction is open: the claim in the message did not win, or the
    /// connection had a foreign transaction, which the next `begin` rolls back first. After
    /// [`FOREIGN_TRANSACTIONS`] of them this is [`Error::UnknownTransaction`].
    pub(crate) async fn begin(&mut self, opening: &Opening) -> Result<Option<PgTransaction<'_>>, Error> {
        self.beginning = true;
        // If sqlx counts a transaction, each attempt to begin queues a ROLLBACK.
        if self.foreign > 0 && !self.conn.is_in_transaction() {
            self.conn.execute("rollback").await?;
        }
        let begun = opening.judge(self.conn.begin_with(opening.sql()).await);
        Ok(match begun? {
            Begun::Open(transaction) => {
                self.beginning = false;
                Some(transaction)
            }
            Begun::Taken => {
                self.beginning = false;
                None
            }
            Begun::Foreign => {
                self.foreign += 1;
                if self.foreign == FOREIGN_TRANSACTIONS {
                    return Err(Error::UnknownTransaction);
                }
                None
            }
        })
    }

    /// After a COMMIT of sqlx. Fails if the caller's code has begun a nested transaction and forgotten its guard: then
    /// sqlx has released a savepoint in place of the COMMIT. Nothing is committed, and the connection is closed.
    pub(crate) fn committed(&self) -> Result<(), Error> {
        if self.conn.is_in_transaction() { Err(Error::NotInTransaction) } else { Ok(()) }
    }

    /// Runs `work` in a transaction, which commits if the work returns `Ok` and is rolled back otherwise.
    pub(super) async fn in_transaction<R, E, W>(mut self, opening: &Opening, work: W) -> Result<R, E>
    where
        E: From<Error>,
        W: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
    {
        let mut transaction = loop {
            if let Some(transaction) = self.begin(opening).await? {
                break transaction;
            }
        };
        let worked = work(&mut transaction).await;
        if worked.is_err() || !opening.commits() {
            // A ROLLBACK fails only if the connection is broken, and then the server rolls back. The caller needs the
            // first error.
            let _ = transaction.rollback().await;
            return worked;
        }
        transaction.commit().await.map_err(Error::from)?;
        self.committed()?;
        worked
    }
}

impl Drop for Session {
    /// sqlx does not count a transaction if the future was dropped during BEGIN. The next statement on the connection
    /// would look like autocommit, and would be lost. So this puts a ROLLBACK behind the BEGIN: `begin_with` writes its
    /// text before it waits, whatever the text is.
    ///
    /// If sqlx counts a transaction, somebody has forgotten its guard. The next user of the pool would take it for
    /// theirs, so the connection is closed.
    fn drop(&mut self) {
        if self.conn.is_in_transaction() {
            self.conn.close_on_drop();
        } else if self.beginning {
            let _ = pin!(self.conn.begin_with("rollback")).poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

/// Runs `work` in a transaction of its own, which commits if the work returns `Ok` and is rolled back otherwise.
///
/// # Cancellation
///
/// If the future is dropped, the transaction is rolled back, or the COMMIT was already sent and may take effect.
pub(crate) async fn in_pooled_transaction<R, E, W>(pool: &PgPool, opening: Opening, work: W) -> Result<R, E>
where
    E: From<Error>,
    W: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    Session::of(pool).await?.in_transaction(&opening, work).await
}

/// Commits a transaction that the crate has begun, whatever sqlx counts. If the caller's code has begun a nested
/// transaction and forgotten its guard, sqlx's own `commit` releases a savepoint in place of the COMMIT, and returns `Ok`.
///
/// The chained transaction is empty, and holds neither lock nor snapshot. The caller ends it with sqlx's guard, and nobody
/// waits for that. If a guard was forgotten, sqlx then names a savepoint that is not there, and the pool closes the
/// connection.
pub(crate) async fn commit_and_chain(conn: &mut PgConnection) -> Result<(), Error> {
    conn.execute(COMMIT_AND_CHAIN).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // The caller's code has ended the transaction.
        Some(sqlstate::NO_ACTIVE_TRANSACTION) => Error::NotInTransaction,
        _ => error.into(),
    })
}
