//! The transactions that sqlx counts on a connection: none in autocommit, one in a transaction, and one more for each
//! nested transaction, which is a savepoint.
//!
//! `sqlx` does not export this count, and `sqlx-core` does. This is the only file that uses `sqlx-core`.

use sqlx::{Connection as _, Executor as _, PgConnection, Postgres, SqlStr};
use sqlx_core::database::Database;
use sqlx_core::transaction::TransactionManager;

type Manager = <Postgres as Database>::TransactionManager;

/// How often a ROLLBACK may fail. Somebody would have to cancel each of them.
const ROLLBACKS: usize = 3;

pub(crate) fn depth(conn: &PgConnection) -> usize {
    Manager::get_transaction_depth(conn)
}

/// Begins a transaction with this message. sqlx counts it once the server has answered.
pub(super) async fn begin(conn: &mut PgConnection, message: SqlStr) -> sqlx::Result<()> {
    Manager::begin(conn, Some(message)).await
}

/// Commits the innermost transaction.
pub(super) async fn commit(conn: &mut PgConnection) -> sqlx::Result<()> {
    Manager::commit(conn).await
}

/// Rolls back all transactions that are deeper than `depth`.
///
/// This returns no error. A ROLLBACK fails if the connection is broken, and then the server rolls back, or if somebody
/// cancels it (`pg_cancel_backend`), and then this sends another one. A ROLLBACK TO SAVEPOINT also fails if the
/// caller's SQL has removed the savepoint.
///
/// # Cancellation
///
/// All of them are queued before the first await, and the next statement on the connection sends them. What follows a
/// ROLLBACK that somebody has cancelled is not queued: a [`Session`](super::Session) sends a ROLLBACK when it is
/// dropped.
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
