//! The COMMIT of a caller's transaction. It fails if nothing would be saved.

use sqlx::{Executor as _, PgTransaction};

use super::depth::{depth, roll_back_to};
use crate::Error;
use crate::error::sqlstate;

/// These statements fail in an aborted transaction (25P02) and outside a transaction (25P01). They change nothing in a
/// usable transaction.
const IS_THERE: &str = "savepoint pg_idempotency; release savepoint pg_idempotency";

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
/// release a savepoint, this refuses it, and rolls back the outer transaction, too. Use `tx.commit()` there. After such an
/// error, the outer `tx.commit()` of sqlx returns `Ok` and saves nothing, so return the error.
///
/// # What it cannot see
///
/// Some statements leave a transaction that looks like the caller's: a raw COMMIT or ROLLBACK with `and chain`, and a
/// raw COMMIT or ROLLBACK that is followed by a raw BEGIN. Send none of these on a connection whose transaction sqlx
/// has begun. Inside `perform` the crate notices them.
///
/// # Errors
///
/// - [`Error::TransactionAborted`]: a statement had failed before. Nothing was saved, and the transaction is rolled
///   back.
/// - [`Error::NotInTransaction`]: the transaction had ended before, by a raw COMMIT or ROLLBACK, or by a nested `begin`
///   that failed, or whose future was dropped while it waited.
/// - [`Error::NestedTransaction`]: a nested transaction is open, because its guard was forgotten, or because it is `tx`
///   itself. Everything is rolled back.
/// - [`Error::Retryable`] and [`Error::Database`] of the COMMIT itself: a deferred constraint, a serialization failure.
///   After an error of the connection **it is unknown** whether the COMMIT took effect: ask again with the same key.
///
/// # Cancellation
///
/// The transaction is rolled back, or the COMMIT was already sent and may take effect.
pub async fn commit(mut tx: PgTransaction<'_>) -> Result<(), Error> {
    match depth(&tx) {
        // A cancelled nested `begin` has rolled back the transaction around it, and sqlx then sends no COMMIT.
        0 => return Err(Error::NotInTransaction),
        1 => {}
        // If one level were left, the pool would get an open transaction.
        _ => {
            roll_back_to(&mut tx, 0).await;
            return Err(Error::NestedTransaction);
        }
    }
    let Err(error) = tx.execute(IS_THERE).await else {
        return Ok(tx.commit().await?);
    };
    roll_back_to(&mut tx, 0).await;
    Err(match sqlstate(&error).as_deref() {
        Some(sqlstate::IN_FAILED_TRANSACTION) => Error::TransactionAborted(error),
        Some(sqlstate::NO_ACTIVE_TRANSACTION) => Error::NotInTransaction,
        _ => error.into(),
    })
}
