//! The protection of business tables. The database refuses writes to a protected table outside an idempotent operation.

use sqlx::PgPool;

use crate::SetupError;
use crate::record::{self, OnEscape, Opening};
use crate::session::in_pooled_transaction;

/// Makes the database refuse each write to this table that is made outside an idempotent operation, or warn of such a
/// write. A write is outside an operation if it goes through another connection of the pool, runs in autocommit, comes
/// before the claim, or comes after a replay. A handler with such a write fails in its first test, and not only when a
/// customer gets a second order.
///
/// Write the table's name as in an SQL statement. The name follows `search_path`, and a name such as `public."Orders"`
/// needs its quotes. If the table is already protected in this way, the call changes and locks nothing. A service may
/// therefore call `protect` at every start, after [`migrate`](crate::migrate()). To add or change the protection, the
/// call takes a `share row exclusive` lock. The call waits for the writers of the table, for at most the connection's
/// `lock_timeout`. The call also protects the present partitions. A partition that is attached later needs another
/// call. [`operator::health`](crate::operator::health()) finds a partition without protection.
///
/// A transaction that may write outside an operation, such as a backfill, sends
/// `set local idempotency.claim = 'exempt'`. The guide's page `nothing_escapes` lists what the database cannot see.
///
/// ```no_run
/// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::SetupError> {
/// use pg_idempotency::OnEscape;
///
/// pg_idempotency::migrate(&pool).await?;
/// pg_idempotency::protect(&pool, "orders", OnEscape::Refuse).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// - [`SetupError::Refused`]: no table has this name in the schemas of `search_path` or in the schema that the name
///   contains, or the role does not own the table. The call also refuses a view, a foreign table, a partition or child
///   of another table, a table that Citus distributes, and the crate's own tables.
/// - [`Error::SchemaMissing`](crate::Error::SchemaMissing): run [`migrate`](crate::migrate()) first.
/// - [`Incompatible::Schema`](crate::Incompatible::Schema): the schema [cannot be
///   trusted](crate::operator::Warning::UntrustedSchema).
/// - [`Error::Database`](crate::Error::Database), for example if `lock_timeout` has ended the wait for the table.
///
/// # Cancellation
///
/// The whole call is one transaction, which takes effect completely or not at all.
pub async fn protect(pool: &PgPool, table: &str, on_escape: OnEscape) -> Result<(), SetupError> {
    in_pooled_transaction(pool, Opening::PLAIN, async |conn| {
        super::current(conn).await?;
        record::protect(conn, table, on_escape).await
    })
    .await
}

/// Removes the protection of [`protect`] from this table and its partitions. If there is no protection, the call does
/// nothing.
///
/// # Errors
///
/// As [`protect`].
///
/// # Cancellation
///
/// The whole call is one transaction, which takes effect completely or not at all.
pub async fn unprotect(pool: &PgPool, table: &str) -> Result<(), SetupError> {
    in_pooled_transaction(pool, Opening::PLAIN, async |conn| {
        super::current(conn).await?;
        record::unprotect(conn, table).await
    })
    .await
}
