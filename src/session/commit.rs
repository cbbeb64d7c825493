//! The COMMIT of a caller's transaction, which fails where nothing would be saved.

use sqlx::{Connection as _, Executor as _, PgTransaction};

use crate::Error;
use crate::error::sqlstate;

/// Both fail in an aborted transaction (25P02) and outside a transaction (25P01), and change nothing in one that is well.
const IS_THERE: &str = "savepoint pg_idempotency; release savepoint pg_idempotency";

/// Commits a transaction, and fails where its COMMIT would succeed and save nothing.
///
/// PostgreSQL answers the COMMIT of an aborted transaction with a ROLLBACK, and sqlx's `tx.commit()` says `Ok`. A consumer
/// that swallows one error of a statement would then acknowledge an event that was never stored, together with its
/// [mark](crate::dedup). Take this function in place of `tx.commit()` wherever a transaction holds a mark or a claim:
///
/// ```no_run
/// # use std::time::Duration;
/// # use pg_idempotency::{Error, Key, dedup::{Marked, mark}};
/// # async fn deliver(pool: sqlx::PgPool, key: Key) -> Result<(), Error> {
/// let mut tx = pool.begin().await?;
/// if mark(&mut tx, &key, Duration::from_secs(7 * 24 * 3600)).await? == Marked::First {
///     sqlx::query("insert into …").execute(&mut *tx).await?;
/// }
/// pg_idempotency::commit(tx).await?; // and only now acknowledge the event
/// # Ok(()) }
/// ```
///
/// It takes one round trip more than `tx.commit()`: sqlx does not say whether a transaction is a savepoint in another one, so
/// the check cannot travel with a COMMIT. A savepoint (`tx.begin()`) is released, as by its own `commit`, and the transaction
/// around it is still to be committed.
///
/// # What it cannot see
///
/// A raw COMMIT or ROLLBACK that is followed by a raw BEGIN, or that ends in `and chain`, leaves a transaction that looks like
/// the caller's. Send neither on a connection whose transaction sqlx has begun. Inside `perform` the crate notices that too.
///
/// # Errors
///
/// - [`Error::TransactionAborted`]: a statement had failed before. Nothing was saved, and the transaction is rolled back.
/// - [`Error::NotInTransaction`]: the transaction had ended before, by a raw COMMIT or ROLLBACK, or by a nested `begin` whose
///   future was dropped while it waited.
/// - [`Error::Retryable`] and [`Error::Database`] of the COMMIT itself: a deferred constraint, a serialization failure. After
///   an error of the connection **nobody knows** whether it took effect; ask again with the same key.
///
/// # Cancellation
///
/// Rolled back, or the COMMIT was under way and decides.
pub async fn commit(mut tx: PgTransaction<'_>) -> Result<(), Error> {
    // A nested `begin` that was cancelled has rolled back the transaction around it, and sqlx then leaves COMMIT out.
    if !tx.is_in_transaction() {
        return Err(Error::NotInTransaction);
    }
    let Err(error) = tx.execute(IS_THERE).await else {
        return Ok(tx.commit().await?);
    };
    // A failure to roll back is a broken connection, which has rolled back: the first error is the news.
    let _ = tx.rollback().await;
    Err(match sqlstate(&error).as_deref() {
        Some("25P02") => Error::TransactionAborted(error),
        Some("25P01") => Error::NotInTransaction,
        _ => error.into(),
    })
}
