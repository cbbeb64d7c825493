//! Protected business tables: the database refuses writes to them outside an idempotent operation.

use sqlx::PgPool;

use crate::SetupError;
use crate::record::{self, OnEscape};
use crate::session::{Opening, in_pooled_transaction};

/// From now on the database refuses a write to this table outside an idempotent operation, or warns of it: through
/// another connection of the pool, in autocommit, before the claim, or after a replay. The handler that makes this
/// mistake fails in its first test, and not with a customer's second order.
///
/// The table's name is SQL, so it follows `search_path`, and `public."Orders"` has its quotes. If the table is
/// protected so already, this changes and locks nothing, so a service may call it at every start, after
/// [`migrate`](crate::migrate()). Otherwise it takes a `share row exclusive` lock, which waits for the writers of the
/// table, for as long as the connection's `lock_timeout`. It protects the present partitions, too; one that is attached
/// later needs another call. [`operator::health`](crate::operator::health()) finds a partition without protection.
///
/// A transaction that may write outside, such as a backfill, says so: `set local idempotency.claim = 'exempt'`.
/// The guide's page `nothing_escapes` lists what the database cannot see.
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
/// - [`SetupError::Refused`]: the table is missing or of another schema; it is a view, a foreign table, distributed by
///   Citus, or the crate's own; or the role does not own it.
/// - [`Error::SchemaMissing`](crate::Error::SchemaMissing): run [`migrate`](crate::migrate()) before.
/// - [`Incompatible::Schema`](crate::Incompatible::Schema): the schema [cannot be
///   trusted](crate::operator::Warning::UntrustedSchema).
/// - [`Error::Database`](crate::Error::Database), for example if `lock_timeout` has ended the wait for the table.
///
/// # Cancellation
///
/// All of it is one transaction, done or not done.
pub async fn protect(pool: &PgPool, table: &str, on_escape: OnEscape) -> Result<(), SetupError> {
    in_pooled_transaction(pool, Opening::Plain, async |conn| {
        super::current(conn).await?;
        record::protect(conn, table, on_escape).await
    })
    .await
}

/// Takes the protection of [`protect`] off this table and its partitions. If there is none, does nothing.
///
/// # Errors
///
/// As [`protect`].
///
/// # Cancellation
///
/// All of it is one transaction, done or not done.
pub async fn unprotect(pool: &PgPool, table: &str) -> Result<(), SetupError> {
    in_pooled_transaction(pool, Opening::Plain, async |conn| {
        super::current(conn).await?;
        record::unprotect(conn, table).await
    })
    .await
}
