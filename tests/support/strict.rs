//! The crate's migrations and `migrations/strict.sql`: every statement that the crate sends in these tests must keep
//! the rules of a record.

use std::sync::LazyLock;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};

pub(crate) static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations: Vec<Migration> = pg_idempotency::MIGRATOR.iter().cloned().collect();
    migrations.push(Migration::new(
        i64::MAX,
        "strict".into(),
        MigrationType::Simple,
        include_str!("../../migrations/strict.sql").into_sql_str(),
        false,
    ));
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.create_schema("idempotency");
    migrator.dangerous_set_table_name("idempotency._sqlx_migrations");
    migrator
});
