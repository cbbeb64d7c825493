//! Transactions that outlive a function, for the HTTP layer: it lends them to a handler.

use std::time::Duration;

use sqlx::{Connection as _, Executor as _, PgPool, PgTransaction};

use super::own::{Attempt, NotBegun, Opening, commit_outermost, in_own_transaction};
use super::pooled::FOREIGN_TRANSACTIONS;
use crate::Error;
use crate::error::sqlstate;

/// The pool pings a connection before it takes the connection back. This is the time for that ping. The wait happens
/// only after a mistake elsewhere.
const RELEASE: Duration = Duration::from_millis(20);

/// Begins a transaction on a connection of the pool. **Not safe under cancellation**, because sqlx would give an open
/// transaction back to the pool: call it in a task of its own.
///
/// A connection with a foreign transaction is closed, and another one taken.
pub(crate) async fn begin_pooled(pool: &PgPool, opening: &Opening) -> Result<PgTransaction<'static>, NotBegun> {
    for _ in 0..FOREIGN_TRANSACTIONS {
        match pool.begin_with(opening.sql()).await {
            Err(error) if opening.is_taken(&error) => return Err(NotBegun::Taken),
            // Only the check in this message can fail so. In a foreign transaction it divides by zero (22012), or the
            // claim refuses (IK005), or that transaction is already aborted (25P02).
            Err(error) if matches!(sqlstate(&error).as_deref(), Some("22012" | "IK005" | "25P02")) => {
                close_foreign(pool).await;
            }
            // sqlx counts this transaction: somebody has forgotten its guard. The attempt has rolled it back.
            Err(sqlx::Error::InvalidSavePointStatement) => {}
            begun => return begun.map_err(NotBegun::Failed),
        }
    }
    Err(NotBegun::Foreign)
}

/// Commits a transaction without a claim. Such a transaction has no completion that could fail. But if it is aborted,
/// COMMIT succeeds and saves nothing. And a cancelled nested `begin` may have ended the transaction.
pub(crate) async fn commit_unclaimed(mut transaction: PgTransaction<'static>) -> Result<(), Error> {
    if !transaction.is_in_transaction() {
        return Err(Error::NotInTransaction);
    }
    // In an aborted transaction the first statement fails.
    transaction.execute("select 1").await?;
    commit_outermost(transaction).await
}

/// Closes the idle connections that have a foreign transaction. If the pool's `begin_with` fails on a connection, it
/// gives that connection back to the pool, and does not say which connection it was.
async fn close_foreign(pool: &PgPool) {
    tokio::time::sleep(RELEASE).await;
    let idle: Vec<_> = std::iter::from_fn(|| pool.try_acquire()).collect();
    for mut conn in idle {
        let begun = in_own_transaction(&mut conn, &Opening::Plain, async |_| Ok::<_, Error>(())).await;
        if matches!(begun, Attempt::NotBegun(NotBegun::Foreign, _)) {
            let _ = conn.close().await;
        }
    }
}
