//! The transaction of one connection, and the savepoints in it: how many sqlx counts, how they are rolled back, and the
//! COMMIT of a caller's transaction.
//!
//! sqlx counts none in autocommit, one in a transaction, and one more for each nested transaction, which is a
//! savepoint. `sqlx` does not export this count, and `sqlx-core` does. This is the only file that uses `sqlx-core`.

use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgTransaction, Postgres, SqlStr};
use sqlx_core::database::Database;
use sqlx_core::transaction::TransactionManager;

use crate::error::sqlstate;
use crate::record::{draw_token, prepare_decision, put_back};
use crate::{Deployment, Error, Misuse};

type Manager = <Postgres as Database>::TransactionManager;

/// How often a ROLLBACK may fail. Each failure would need a cancellation by another session.
const ROLLBACKS: usize = 3;

/// These statements fail in an aborted transaction (25P02) and outside a transaction (25P01). They change nothing in a
/// usable transaction.
const IS_THERE: &str = "savepoint pg_idempotency; release savepoint pg_idempotency";

pub(crate) fn depth(conn: &PgConnection) -> usize {
    Manager::get_transaction_depth(conn)
}

/// Begins a transaction with this message. sqlx counts it once the server has answered.
pub(super) async fn begin(conn: &mut PgConnection, message: SqlStr) -> sqlx::Result<()> {
    Manager::begin(conn, Some(message)).await
}

/// Commits the innermost transaction.
pub(super) async fn commit_innermost(conn: &mut PgConnection) -> sqlx::Result<()> {
    Manager::commit(conn).await
}

/// Rolls back all transactions that are deeper than `depth`.
///
/// This function returns no error. A ROLLBACK fails if the connection is broken: then the server rolls back. It also
/// fails if another session cancels it (`pg_cancel_backend`): then this function sends another one. A ROLLBACK TO
/// SAVEPOINT also fails if the caller's SQL has removed the savepoint.
///
/// # Cancellation
///
/// All of them are queued before the first await, and the next statement on the connection sends them. The statements
/// after a cancelled ROLLBACK are not queued: a [`Session`](super::Session) sends a ROLLBACK when it is dropped.
pub(crate) async fn roll_back_to(conn: &mut PgConnection, depth: usize) {
    let queued = queue_rollbacks(conn, depth);
    if queued == 0 {
        return;
    }
    // A ping returns at the first error that it reads. One more error may be that of a statement whose future was
    // dropped.
    let mut failed = false;
    for _ in 0..=queued {
        match conn.ping().await {
            Ok(()) => break,
            Err(_) => failed = true,
        }
    }
    // If it was the error of a ROLLBACK, the server's transaction is open, and sqlx counts none: the pool would give it
    // to the next caller. Outside a transaction, a ROLLBACK is a warning.
    if failed && depth == 0 {
        for _ in 0..ROLLBACKS {
            if conn.execute("rollback").await.is_ok() {
                break;
            }
        }
    }
}

/// Queues what rolls back all transactions that are deeper than `depth`, and returns their number.
pub(super) fn queue_rollbacks(conn: &mut PgConnection, depth: usize) -> usize {
    let mut queued = 0;
    while Manager::get_transaction_depth(conn) > depth {
        Manager::start_rollback(conn);
        queued += 1;
    }
    queued
}

/// A savepoint in plain SQL, because a cancelled nested `conn.begin()` of sqlx rolls back the outer transaction. Its
/// name contains the claim's token. An inner call that was dropped leaves its savepoint behind. If all savepoints had
/// the same name, the ROLLBACK TO SAVEPOINT of the outer call would stop at the savepoint of the inner call.
///
/// The name is formatted at run time, from sixteen hexadecimal digits, because it cannot be a parameter.
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

    /// Undoes everything after the savepoint, and removes the savepoint, in one round trip.
    pub(crate) async fn undo(self, conn: &mut PgConnection) -> Result<(), Error> {
        let name = format!("idempotency_{:016x}", self.token);
        command(conn, format!("rollback to savepoint {name}; release savepoint {name}")).await
    }
}

async fn command(conn: &mut PgConnection, sql: String) -> Result<(), Error> {
    conn.execute(AssertSqlSafe(sql)).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // No such savepoint, or no transaction: `perform` has ended it.
        Some(sqlstate::INVALID_SAVEPOINT | sqlstate::NO_ACTIVE_TRANSACTION) => Error::Misuse(Misuse::NotInTransaction),
        _ => error.into(),
    })
}

/// Runs the statements of an operator's decision in the caller's transaction, as
/// [`Opening::DurableAllRows`](super::Opening::DurableAllRows) does in one of the crate's. If they fail, the
/// transaction is as it was before. Otherwise only `synchronous_commit` may be another.
///
/// # Cancellation
///
/// The caller has to roll the transaction back.
pub(crate) async fn in_callers_transaction<R, E: From<Error>>(
    conn: &mut PgConnection,
    deployment: Deployment,
    decision: impl AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
) -> Result<R, E> {
    if !conn.is_in_transaction() {
        return Err(Error::Misuse(Misuse::NotInTransaction).into());
    }
    // A savepoint that is rolled back restores the settings, too.
    let savepoint = Savepoint::set(conn, draw_token()?).await?;
    let decided = async {
        let row_security = prepare_decision(conn, deployment).await?;
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
/// PostgreSQL answers the COMMIT of an aborted transaction with a ROLLBACK, and sqlx's `tx.commit()` returns `Ok`. A
/// consumer that ignores one error of a statement would then acknowledge an event although neither the event nor its
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
/// This takes one more round trip than `tx.commit()`. If `tx` is a nested transaction (`tx.begin()`), which would only
/// release a savepoint, this refuses it, and rolls back the outer transaction, too. Use `tx.commit()` there. After such
/// an error, the outer `tx.commit()` of sqlx returns `Ok` and saves nothing, so return the error.
///
/// # What it cannot see
///
/// Some statements leave a transaction that looks like the caller's: a raw COMMIT or ROLLBACK with `and chain`, and a
/// raw COMMIT or ROLLBACK that is followed by a raw BEGIN. Send none of these on a connection whose transaction sqlx
/// has begun. Inside `perform` the crate notices them.
///
/// # Errors
///
/// - [`Misuse::TransactionAborted`](crate::Misuse::TransactionAborted): a statement had failed before. Nothing was
///   saved, and the transaction is rolled back.
/// - [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction): the transaction had ended before, by a raw COMMIT
///   or ROLLBACK, or by a nested `begin` that failed, or whose future was dropped while it waited.
/// - [`Misuse::NestedTransaction`](crate::Misuse::NestedTransaction): a nested transaction is open, because its guard
///   was forgotten, or because it is `tx` itself. Everything is rolled back.
/// - [`Error::Retryable`] and [`Error::Database`] of the COMMIT itself: a deferred constraint, a serialization failure.
///   After an error of the connection **it is unknown** whether the COMMIT took effect: ask again with the same key.
///
/// # Cancellation
///
/// The transaction is rolled back, or the COMMIT was already sent and may take effect.
pub async fn commit(mut tx: PgTransaction<'_>) -> Result<(), Error> {
    match depth(&tx) {
        // A cancelled nested `begin` has rolled back the transaction around it, and sqlx then sends no COMMIT.
        0 => return Err(Error::Misuse(Misuse::NotInTransaction)),
        1 => {}
        // If one level were left, the pool would get an open transaction.
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
