//! The crate's migrations and `strict.sql`: every statement that the crate sends in these tests must keep the rules of a
//! record.

use std::sync::LazyLock;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, SqlSafeStr};

/// The rules that every record keeps, as constraints of the table.
pub const SQL: &str = include_str!("../strict.sql");

pub static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| strict(&pg_idempotency::MIGRATOR, None));

/// With the SQL functions for callers in other languages. Only their tests have it, so that the others show what the
/// library can do without these functions.
pub static ANY_LANGUAGE_MIGRATOR: LazyLock<Migrator> =
    LazyLock::new(|| strict(&pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR, None));

/// With `migrations/partitions.sql`, for the tests of what hash partitions change. The table has a quarter of the
/// partitions, because each test creates them in its own database.
pub static PARTITIONED_MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let (all, few) = ("partitions constant int := 16", "partitions constant int := 4");
    let partitions = include_str!("../../../migrations/partitions.sql").replace(all, few);
    assert!(partitions.contains(few));
    strict(&pg_idempotency::MIGRATOR, Some(migration(i64::MAX, "partitions", AssertSqlSafe(partitions))))
});

fn strict(plain: &Migrator, partitions: Option<Migration>) -> Migrator {
    let mut migrations: Vec<Migration> = plain.iter().cloned().collect();
    migrations.push(migration(i64::MAX - 1, "strict", SQL));
    migrations.extend(partitions);
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.create_schema("idempotency");
    migrator.dangerous_set_table_name("idempotency._sqlx_migrations");
    migrator
}

fn migration(version: i64, name: &'static str, sql: impl SqlSafeStr) -> Migration {
    Migration::new(version, name.into(), MigrationType::Simple, sql.into_sql_str(), false)
}
