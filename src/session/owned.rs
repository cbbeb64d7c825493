//! Transactions that outlive a function, for the HTTP layer: it lends them to a handler.

use std::time::Duration;

use sqlx::{Connection as _, Executor as _, PgPool, PgTransaction};

use super::bounded::or_closed;
use super::opening::{Begun, Opening};
use super::own::{FOREIGN_TRANSACTIONS, Session, commit_and_chain};
use crate::Error;

/// The pool pings a connection before it takes the connection back. This is the time for that ping. The wait happens
/// only after a mistake elsewhere.
const RELEASE: Duration = Duration::from_millis(20);

/// Begins a transaction on a connection of the pool. **Not safe under cancellation**, because sqlx would give an open
/// transaction back to the pool: call it in a task of its own. `None` means that no transaction is open: the claim in the
/// message did not win, or each connection had a foreign transaction.
pub(crate) async fn begin_pooled(pool: &PgPool, opening: &Opening) -> Result<Option<PgTransaction<'static>>, Error> {
    for _ in 0..FOREIGN_TRANSACTIONS {
        match opening.judge(pool.begin_with(opening.sql()).await)? {
            Begun::Open(transaction) => return Ok(Some(transaction)),
            Begun::Taken => return Ok(None),
            Begun::Foreign => roll_back_foreign(pool).await,
        }
    }
    Ok(None)
}

/// Rolls back the foreign transactions on idle connections. If the pool's `begin_with` fails on a connection, it gives
/// that connection back to the pool, and does not say which connection it was.
async fn roll_back_foreign(pool: &PgPool) {
    tokio::time::sleep(RELEASE).await;
    let idle: Vec<_> = std::iter::from_fn(|| pool.try_acquire()).collect();
    for conn in idle {
        let _ = Session::on(conn).in_transaction(&Opening::Plain, async |_| Ok::<_, Error>(())).await;
    }
}

/// Commits a transaction without a claim. Such a transaction has no completion that could fail. But if it is aborted,
/// COMMIT succeeds and saves nothing. And a cancelled nested `begin` may have ended the transaction.
pub(crate) async fn commit_unclaimed(transaction: &mut PgTransaction<'static>) -> Result<(), Error> {
    if !transaction.is_in_transaction() {
        return Err(Error::NotInTransaction);
    }
    // In an aborted transaction the first statement fails.
    transaction.execute("select 1").await?;
    commit_and_chain(transaction).await
}

/// Ends a transaction that has written nothing, in a task, so that no answer waits for it: that of a replay, or the one that
/// [`commit_and_chain`] leaves. If the guard were dropped, sqlx would roll back, and each call would count as a rollback in
/// `pg_stat_database`.
pub(crate) fn commit_unwatched(transaction: PgTransaction<'static>, limit: Duration) {
    tokio::spawn(or_closed(limit, transaction.commit()));
}
