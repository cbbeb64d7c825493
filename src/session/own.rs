//! Transactions that the crate begins and ends itself, on connections of a pool.
//!
//! The pool pings each connection that is returned to it. The ping sends a queued ROLLBACK. If a statement failed after its
//! future was dropped, the ping gets the error, and the pool closes the connection. So no call gets an old error.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Instant;

use sqlx::pool::PoolConnection;
use sqlx::{Executor as _, PgConnection, PgPool, Postgres, SqlSafeStr as _};

use super::depth::{begin, commit, depth, queue_rollbacks, roll_back_to};
use super::opening::{Begun, Opening};
use crate::Error;
use crate::error::sqlstate;

/// Commits, and begins an empty transaction, because sqlx still counts one.
pub(crate) const COMMIT_AND_CHAIN: &str = "commit and chain";

/// Fails outside the transaction that began as [`Opening::Exempt`]. It compares only the beginning of the setting, because
/// claims of the handler append their tokens. The savepoint fails outside every transaction: a role may have the setting
/// for all its sessions.
#[cfg(feature = "http")]
const IS_EXEMPT: &str = "savepoint pg_idempotency; release savepoint pg_idempotency; select 1 / pg_catalog.starts_with(
    coalesce(pg_catalog.current_setting('idempotency.claim', true), ''), 'exempt'::text
)::int";

/// A connection of the pool, and the transaction that the crate has begun on it, if there is one. If the session is
/// dropped, the transaction is rolled back.
pub(crate) struct Session {
    conn: PoolConnection<Postgres>,
    /// A message with BEGIN is on its way, or has failed.
    beginning: bool,
    /// When the BEGIN of the open transaction was sent, if nothing has checked that it began the transaction.
    unchecked_since: Option<Instant>,
}

impl Session {
    pub(crate) async fn of(pool: &PgPool) -> Result<Self, Error> {
        let mut conn = pool.acquire().await?;
        // sqlx counts the transaction of a forgotten guard. Not even a look may happen in it.
        roll_back_to(&mut conn, 0).await;
        Ok(Self { conn, beginning: false, unchecked_since: None })
    }

    /// Begins a transaction. `false` means that the claim in the message did not win, and no transaction is open.
    ///
    /// If the connection is in a transaction that nobody owns, this rolls it back, and begins again. Such a transaction is
    /// that of a forgotten guard, which sqlx counts, or of a raw BEGIN, which the opening detects.
    pub(crate) async fn begin(&mut self, opening: &Opening) -> Result<bool, Error> {
        roll_back_to(&mut self.conn, 0).await;
        self.beginning = true;
        let begun = match self.send(opening).await? {
            Begun::Foreign(_) => {
                self.conn.execute("rollback").await?;
                self.send(opening.checked()).await?
            }
            begun => begun,
        };
        // After a ROLLBACK there is no other transaction.
        if let Begun::Foreign(error) = begun {
            return Err(Error::of_statement(error));
        }
        self.beginning = false;
        Ok(matches!(begun, Begun::Open))
    }

    async fn send(&mut self, opening: &Opening) -> Result<Begun, Error> {
        self.unchecked_since = (!opening.is_checked()).then(Instant::now);
        opening.judge(begin(&mut self.conn, opening.sql()).await)
    }

    /// When the BEGIN was sent, if only the age of the transaction can show that it began the transaction: see
    /// [`Opening::BeforeClaim`].
    pub(crate) fn unchecked_since(&self) -> Option<Instant> {
        self.unchecked_since
    }

    pub(crate) fn is_open(&self) -> bool {
        depth(&self.conn) > 0
    }

    /// Fails if the transaction cannot be committed because sqlx would send something else than a COMMIT: the service's
    /// code has forgotten the guard of a nested transaction, or has dropped a nested `begin` while it waited.
    pub(crate) fn check_depth(&self) -> Result<(), Error> {
        match depth(&self.conn) {
            0 => Err(Error::NotInTransaction),
            1 => Ok(()),
            _ => Err(Error::NestedTransaction),
        }
    }

    /// Commits the transaction. After an error drop the session, or roll back.
    pub(crate) async fn commit(&mut self) -> Result<(), Error> {
        self.check_depth()?;
        Ok(commit(&mut self.conn).await?)
    }

    /// Commits a transaction that began as [`Opening::Exempt`] and has no claim, so no completion could fail. PostgreSQL
    /// answers the COMMIT of an aborted transaction with a ROLLBACK, and the handler may have ended the transaction and begun
    /// another one. The setting of the opening ends with its transaction.
    #[cfg(feature = "http")]
    pub(crate) async fn commit_exempt(&mut self) -> Result<(), Error> {
        self.check_depth()?;
        self.conn.execute(IS_EXEMPT).await.map_err(|error| match sqlstate(&error).as_deref() {
            Some(sqlstate::DIVISION_BY_ZERO | sqlstate::NO_ACTIVE_TRANSACTION) => Error::NotInTransaction,
            _ => error.into(),
        })?;
        self.commit().await
    }

    /// Rolls back everything.
    pub(crate) async fn roll_back(&mut self) {
        roll_back_to(&mut self.conn, 0).await;
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
    /// Queues a ROLLBACK, which the pool's ping sends. To close the connection instead would let a service collapse
    /// under short time-outs: somebody has to open each one again, and a connect takes longer than the time-out. If the
    /// future was dropped during BEGIN, sqlx counts no transaction. The next caller would then write into an open
    /// transaction, and lose the write. So a `begin` with the message `rollback` is polled once: `begin` queues its
    /// message before it waits.
    ///
    /// All transactions that sqlx counts are rolled back, because otherwise the pool would get an open one.
    fn drop(&mut self) {
        queue_rollbacks(&mut self.conn, 0);
        if self.beginning {
            let _ =
                pin!(begin(&mut self.conn, "rollback".into_sql_str())).poll(&mut Context::from_waker(Waker::noop()));
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
    let mut session = Session::of(pool).await?;
    session.begin(&opening).await?;
    let worked = work(&mut session).await;
    if worked.is_ok() && opening.commits() {
        session.commit().await?;
    } else {
        session.roll_back().await;
    }
    worked
}

/// Commits the transaction that the crate has begun, in plain SQL. sqlx still counts a transaction, so this begins another
/// one, which is empty, and holds neither lock nor snapshot.
pub(crate) async fn commit_and_chain(conn: &mut PgConnection) -> Result<(), Error> {
    conn.execute(COMMIT_AND_CHAIN).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // The caller's code has ended the transaction.
        Some(sqlstate::NO_ACTIVE_TRANSACTION) => Error::NotInTransaction,
        _ => error.into(),
    })
}
