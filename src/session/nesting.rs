//! The transaction of one connection, and the savepoints in this transaction: their number, their rollback, and the
//! COMMIT of a caller's transaction.
//!
//! sqlx counts zero in autocommit, one in a transaction, and one more for each nested transaction, which is a
//! savepoint. The crate `sqlx` does not export this count, but `sqlx-core` does. Only this file uses `sqlx-core`.

use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgTransaction, Postgres, SqlSafeStr as _};
use sqlx_core::database::Database;
use sqlx_core::transaction::TransactionManager;

use crate::error::sqlstate;
use crate::record::{draw_token, prepare_decision, put_back};
use crate::{Error, Misuse};

type Manager = <Postgres as Database>::TransactionManager;

/// How many times a failed ROLLBACK is sent again. On an intact connection, a ROLLBACK that is sent again fails only if
/// another session cancels it.
const ROLLBACKS: usize = 3;

/// Two statements that fail in an aborted transaction (SQLSTATE 25P02) and outside a transaction (SQLSTATE 25P01). In a
/// usable transaction, these statements change nothing.
const IS_THERE: &str = "savepoint pg_idempotency; release savepoint pg_idempotency";

pub(crate) fn depth(conn: &PgConnection) -> usize {
    Manager::get_transaction_depth(conn)
}

/// Begins a transaction with this message. sqlx counts the transaction once the server has answered.
pub(super) async fn begin(conn: &mut PgConnection, message: &'static str) -> sqlx::Result<()> {
    Manager::begin(conn, Some(message.into_sql_str())).await
}

pub(super) async fn commit_innermost(conn: &mut PgConnection) -> sqlx::Result<()> {
    Manager::commit(conn).await
}

/// Rolls back all transactions that are deeper than `depth`.
///
/// This function returns no error. If the connection is broken, a ROLLBACK fails, but then the server rolls back. If
/// another session cancels the ROLLBACK (`pg_cancel_backend`), this function sends another ROLLBACK. A ROLLBACK TO
/// SAVEPOINT also fails if the caller's SQL has removed the savepoint.
///
/// # Cancellation
///
/// All ROLLBACK statements are queued before the first await, and the next statement on the connection sends them. But
/// a ROLLBACK that follows a cancelled ROLLBACK is not queued. So a [`Session`](super::Session) sends a ROLLBACK when
/// the session is dropped.
pub(crate) async fn roll_back_to(conn: &mut PgConnection, depth: usize) {
    let queued = queue_rollbacks(conn, depth);
    if queued == 0 {
        return;
    }
    // A ping returns at the first error that it reads. Each queued statement may have failed, and also one earlier
    // statement whose future was dropped.
    let mut failed = false;
    for _ in 0..=queued {
        match conn.ping().await {
            Ok(()) => break,
            Err(_) => failed = true,
        }
    }
    // If a ROLLBACK has failed, the server's transaction is open, but sqlx does not count it. The pool would give this
    // transaction to the next caller. Outside a transaction, a ROLLBACK only causes a warning.
    if failed && depth == 0 {
        for _ in 0..ROLLBACKS {
            if conn.execute("rollback").await.is_ok() {
                break;
            }
        }
    }
}

/// Queues the statements that roll back all transactions deeper than `depth`, and returns the number of statements.
pub(super) fn queue_rollbacks(conn: &mut PgConnection, depth: usize) -> usize {
    let mut queued = 0;
    while Manager::get_transaction_depth(conn) > depth {
        Manager::start_rollback(conn);
        queued += 1;
    }
    queued
}

/// After an error which shows that a caller's connection has lost its prepared statements, lets sqlx prepare them
/// again. Otherwise each later call on this connection would fail. An error of this function is ignored, because the
/// caller needs the first error.
pub(crate) async fn or_prepare_again<R>(conn: &mut PgConnection, called: Result<R, Error>) -> Result<R, Error> {
    if called.as_ref().is_err_and(Error::has_lost_statements) {
        let _ = conn.clear_cached_statements().await;
    }
    called
}

/// A savepoint in plain SQL, because a cancelled nested `conn.begin()` of sqlx rolls back the outer transaction. The
/// name of the savepoint contains the claim's token. An inner call that was dropped leaves its savepoint behind. If all
/// savepoints had the same name, the ROLLBACK TO SAVEPOINT of the outer call would stop at the savepoint of the inner
/// call.
///
/// The name is formatted at run time, from sixteen hexadecimal digits, because a name cannot be a parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Savepoint {
    token: i64,
}

impl Savepoint {
    pub(crate) async fn set(conn: &mut PgConnection, token: i64) -> Result<Self, Error> {
        command(conn, format!("savepoint idempotency_{token:016x}")).await?;
        Ok(Self { token })
    }

    pub(crate) async fn release(self, conn: &mut PgConnection) -> Result<(), Error> {
        command(conn, format!("release savepoint idempotency_{:016x}", self.token)).await
    }

    /// Undoes everything after the savepoint, and keeps the savepoint.
    pub(crate) async fn roll_back_to(self, conn: &mut PgConnection) -> Result<(), Error> {
        command(conn, format!("rollback to savepoint idempotency_{:016x}", self.token)).await
    }

    /// Undoes everything after the savepoint, and removes the savepoint, in one round trip.
    pub(crate) async fn undo(self, conn: &mut PgConnection) -> Result<(), Error> {
        let name = format!("idempotency_{:016x}", self.token);
        command(conn, format!("rollback to savepoint {name}; release savepoint {name}")).await
    }
}

async fn command(conn: &mut PgConnection, sql: String) -> Result<(), Error> {
    conn.execute(AssertSqlSafe(sql)).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // The savepoint or the transaction is gone, because `perform` has ended it.
        Some(sqlstate::INVALID_SAVEPOINT | sqlstate::NO_ACTIVE_TRANSACTION) => Error::Misuse(Misuse::NotInTransaction),
        _ => error.into(),
    })
}

/// Runs the statements of an operator's decision in the caller's transaction, with the settings of
/// [`Opening::DURABLE_ALL_ROWS`](crate::record::Opening). If the statements fail, the transaction is as it was
/// before. If the statements succeed, only the setting `synchronous_commit` may have changed.
///
/// # Cancellation
///
/// If the future is dropped, the caller has to roll the transaction back.
pub(crate) async fn in_callers_transaction<R, E: From<Error>>(
    conn: &mut PgConnection,
    decision: impl AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
) -> Result<R, E> {
    if !conn.is_in_transaction() {
        return Err(Error::Misuse(Misuse::NotInTransaction).into());
    }
    // A rollback to this savepoint also restores the settings.
    let savepoint = Savepoint::set(conn, draw_token()?).await?;
    let decided = async {
        let row_security = prepare_decision(conn).await?;
        let decided = decision(conn).await?;
        put_back(conn, &row_security).await?;
        Ok(decided)
    };
    let decided = decided.await;
    match decided {
        Ok(_) => savepoint.release(conn).await?,
        Err(_) => savepoint.undo(conn).await?,
    }
    decided
}

/// Commits a transaction, or fails if the COMMIT would save nothing.
///
/// PostgreSQL answers the COMMIT of an aborted transaction with a ROLLBACK, but sqlx's `tx.commit()` returns `Ok`. So a
/// consumer that ignores one error of a statement may acknowledge an event although neither the event nor its
/// [mark](crate::mark) was stored. Use this function instead of `tx.commit()` if the transaction holds a mark or a
/// claim:
///
/// ```no_run
/// # use std::time::Duration;
/// # use pg_idempotency::{Error, Key, mark::{Marked, mark}};
/// # async fn deliver(pool: sqlx::PgPool, key: Key) -> Result<(), Error> {
/// let mut tx = pool.begin().await?;
/// if mark(&mut tx, &key, Duration::from_secs(7 * 24 * 3600)).await? == Marked::First {
///     sqlx::query("insert into …").execute(&mut *tx).await?;
/// }
/// pg_idempotency::commit(tx).await?; // and only now acknowledge the event
/// # Ok(()) }
/// ```
///
/// This function takes one round trip more than `tx.commit()`. The function refuses a nested transaction
/// (`tx.begin()`), because its COMMIT would only release a savepoint. For a nested transaction, use `tx.commit()`. A
/// refusal also rolls back the outer transaction. The outer `tx.commit()` of sqlx then returns `Ok` and saves nothing,
/// so return the error of this function.
///
/// # What it cannot see
///
/// After some raw statements, another transaction is open, which looks like the caller's transaction. Such statements
/// are a COMMIT or ROLLBACK with `and chain`, and a COMMIT or ROLLBACK that is followed by a BEGIN. Do not send these
/// statements on a connection whose transaction sqlx has begun. Inside `perform`, the crate notices such statements.
///
/// # Errors
///
/// - [`Misuse::TransactionAborted`](crate::Misuse::TransactionAborted): a statement had failed before the call. Nothing
///   was saved, and the transaction is rolled back.
/// - [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction): the transaction had ended before the call. The
///   reason is a raw COMMIT or ROLLBACK, or a nested `begin` that failed or whose future was dropped while it waited.
/// - [`Misuse::NestedTransaction`](crate::Misuse::NestedTransaction): a nested transaction is open, because its guard
///   was forgotten, or because `tx` itself is nested. Everything is rolled back.
/// - [`Error::Retryable`] and [`Error::Database`]: the COMMIT itself failed, for example because of a deferred
///   constraint or a serialization failure. After an error of the connection, **it is unknown** whether the COMMIT took
///   effect. So call again with the same key.
///
/// # Cancellation
///
/// If the future is dropped, the transaction is rolled back. A COMMIT that was already sent may take effect.
pub async fn commit(mut tx: PgTransaction<'_>) -> Result<(), Error> {
    match depth(&tx) {
        // A cancelled nested `begin` has rolled back the transaction around it, and sqlx then sends no COMMIT.
        0 => return Err(Error::Misuse(Misuse::NotInTransaction)),
        1 => {}
        // All levels are rolled back, because otherwise the pool would get an open transaction.
        _ => {
            roll_back_to(&mut tx, 0).await;
            return Err(Error::Misuse(Misuse::NestedTransaction));
        }
    }
    let Err(error) = tx.execute(IS_THERE).await else {
        return Ok(tx.commit().await?);
    };
    roll_back_to(&mut tx, 0).await;
    Err(match sqlstate(&error).as_deref() {
        Some(sqlstate::IN_FAILED_TRANSACTION) => Error::Misuse(Misuse::TransactionAborted(error)),
        Some(sqlstate::NO_ACTIVE_TRANSACTION) => Error::Misuse(Misuse::NotInTransaction),
        _ => error.into(),
    })
}
