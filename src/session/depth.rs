//! The transactions that sqlx counts on a connection: none in autocommit, one in a transaction, and one more for each
//! nested transaction, which is a savepoint.
//!
//! `sqlx` does not export this count, and `sqlx-core` does. This is the only file that uses `sqlx-core`.

use sqlx::{Connection as _, PgConnection, Postgres, SqlStr};
use sqlx_core::database::Database;
use sqlx_core::transaction::TransactionManager;

type Manager = <Postgres as Database>::TransactionManager;

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
/// A ROLLBACK fails only if the connection is broken, and then the server rolls back. One to a savepoint also fails if SQL
/// of the caller has removed the savepoint. The callers of this function already have an error to return.
///
/// # Cancellation
///
/// All of them are queued before the first await, and the next statement on the connection sends them.
pub(crate) async fn roll_back_to(conn: &mut PgConnection, depth: usize) {
    // Each error ends a ping.
    for _ in 0..queue_rollbacks(conn, depth) {
        if conn.ping().await.is_ok() {
            break;
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
