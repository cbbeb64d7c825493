//! The SQL functions for callers in other languages, which only services with such callers install.

#[cfg(feature = "testing")]
use std::sync::LazyLock;

use sqlx::PgPool;
#[cfg(feature = "testing")]
use sqlx::migrate::Migrator;
#[cfg(feature = "testing")]
use sqlx::{AssertSqlSafe, SqlSafeStr as _};

use super::FUNCTIONS;
use crate::SetupError;

/// As [`migrate`](crate::migrate()), and also creates the SQL functions for callers in other languages. Then each
/// [`migrate`](crate::migrate()) of a later release replaces them. If everything is up to date, this does nothing. The
/// guide's page `any_language` describes the functions.
///
/// ```no_run
/// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::SetupError> {
/// pg_idempotency::migrate_any_language(&pool).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// As [`migrate`](crate::migrate()).
///
/// # Cancellation
///
/// All of it is one transaction, done or not done.
pub async fn migrate_any_language(pool: &PgPool) -> Result<(), SetupError> {
    super::install(pool, true).await
}

/// The SQL that [`migrate_any_language`] runs after that of [`schema_sql`](crate::schema_sql), for a DBA to run. It is
/// one transaction. It can be run again, over the functions of any earlier release.
#[must_use]
pub fn any_language_sql() -> String {
    format!("begin;\n\n{FUNCTIONS}\ncommit;\n")
}

/// [`MIGRATOR`](crate::MIGRATOR) with the SQL functions for callers in other languages, for
/// `#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]`. A database that outlives a test needs
/// [`migrate_any_language`](crate::migrate_any_language), because this migrator does not replace the functions of an
/// earlier release.
#[cfg(feature = "testing")]
pub static ANY_LANGUAGE_MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations = super::MIGRATIONS.to_vec();
    // In the last migration, whose checksum remains, so that the database records what `migrate` would record.
    if let Some(last) = migrations.last_mut() {
        last.sql = AssertSqlSafe(format!("{}\n{FUNCTIONS}", last.sql.as_str())).into_sql_str();
    }
    super::migrator(migrations)
});
