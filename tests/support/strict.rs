//! The crate's migrations and `migrations/strict.sql`: every statement that the crate sends in these tests is held to the
//! rules of a record.

use std::sync::LazyLock;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};

pub(crate) static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations: Vec<Migration> = pg_idempotency::MIGRATOR.iter().cloned().collect();
    migrations.push(Migration::new(
        i64::MAX - 1,
        "strict".into(),
        MigrationType::Simple,
        include_str!("../../migrations/strict.sql").into_sql_str(),
        false,
    ));
    // After the rules: Citus takes no ALTER TABLE with so many.
    #[cfg(idempotency_distributed)]
    migrations.push(Migration::new(
        i64::MAX,
        "distributed".into(),
        MigrationType::Simple,
        "select create_distributed_table('idempotency.record', 'scope')".into_sql_str(),
        false,
    ));
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.create_schema("idempotency");
    migrator.dangerous_set_table_name("idempotency._sqlx_migrations");
    migrator
});
