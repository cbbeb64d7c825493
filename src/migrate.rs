//! Creating the table, in three ways that know of each other: [`migrate`], [`MIGRATOR`] and [`schema_sql`].

use std::fmt::Write as _;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{Connection, Executor, PgConnection, Row, SqlSafeStr as _};

use crate::error::sqlstate;
use crate::session::in_any_transaction;
use crate::{Error, record};

/// The table in which sqlx's migrator records what is applied; a schema of our own keeps it apart from the application's.
const APPLIED: &str = "idempotency._sqlx_migrations";

/// A migration is over in a second; a larger table takes longer.
const LOCK_WAIT: Duration = Duration::from_secs(60);

/// All migrations, oldest first. One that was released is never edited: the checksums are recorded.
static MIGRATIONS: LazyLock<[Migration; 1]> = LazyLock::new(|| {
    [Migration::new(
        1,
        "create record".into(),
        MigrationType::Simple,
        include_str!("../migrations/0001_create_record.sql").into_sql_str(),
        false,
    )]
});

/// This crate's migrations as an sqlx migrator, for `#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]` and for those
/// who run all their migrations that way.
///
/// It records what is applied in `idempotency._sqlx_migrations` and never touches the application's own table. It takes a
/// session-level advisory lock, so not through PgBouncer in transaction mode: [`migrate`] works there. The two take different
/// locks: where both run at the same moment on an empty database, [`migrate`] tries again, and this one may fail once.
///
/// Like [`migrate`], it passes over what a newer release has applied: during a roll-out old processes start on the new schema.
pub static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrator = Migrator::with_migrations(MIGRATIONS.to_vec());
    migrator.create_schema("idempotency");
    migrator.dangerous_set_table_name(APPLIED);
    migrator.set_ignore_missing(true);
    migrator
});

/// Creates the schema `idempotency` and its table, or brings them up to date. Does nothing when they are, without any
/// right on the schema but to read it; so services may call it at every start. Migrations of a newer release are passed over.
///
/// Safe to call from many processes at once, in a transaction, through PgBouncer, and beside the application's own
/// migrations. `search_path` is neither read nor changed. It waits for another session that migrates: for a minute, or for as
/// long as the connection's `lock_timeout` says, where that is shorter.
///
/// ```no_run
/// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::Error> {
/// pg_idempotency::migrate(&mut *pool.acquire().await?).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`Error::Database`], most often for want of the right to create a schema: have a DBA run [`schema_sql`]. An applied
/// migration whose checksum is not this release's own is an error too, and nothing is changed. [`Error::MigrationLocked`]
/// where another session has the lock for longer than the wait.
///
/// # Cancellation
///
/// All of it is one transaction: done or not begun.
pub async fn migrate(conn: &mut PgConnection) -> Result<(), Error> {
    if missing(conn).await?.is_empty() {
        return Ok(());
    }
    let callers = conn.is_in_transaction();
    match in_any_transaction(conn, apply).await {
        // sqlx's migrator, under a lock of its own, was creating the same schema or table at this moment. A caller's transaction
        // is aborted by that.
        Err(Error::Database(error))
            if !callers && matches!(sqlstate(&error).as_deref(), Some("23505" | "42P06" | "42P07")) =>
        {
            in_any_transaction(conn, apply).await
        }
        applied => applied,
    }
}

/// The SQL that [`migrate`] runs on an empty database, for people whose DBA runs it: one transaction, and recorded so that
/// [`migrate`] and [`MIGRATOR`] find it applied.
#[must_use]
pub fn schema_sql() -> String {
    let mut sql = format!("begin;\n\n{PREPARE}\n");
    for migration in MIGRATIONS.iter() {
        let checksum = hex::encode(&migration.checksum);
        let _ = write!(
            sql,
            "{}\ninsert into {APPLIED} (version, description, success, checksum, execution_time)\n\
             values ({}, '{}', true, '\\x{checksum}', -1);\n\n",
            migration.sql.as_str(),
            migration.version,
            migration.description,
        );
    }
    sql.push_str("commit;\n");
    sql
}

/// sqlx's own definition of its table, so that both ways of installing meet the same one.
const PREPARE: &str = "create schema if not exists idempotency;

create table if not exists idempotency._sqlx_migrations (
    version bigint primary key,
    description text not null,
    installed_on timestamptz not null default now(),
    success boolean not null,
    checksum bytea not null,
    execution_time bigint not null
);
";

async fn apply(conn: &mut PgConnection) -> Result<(), Error> {
    lock(conn).await?;
    let missing = missing(conn).await?;
    if missing.is_empty() {
        return Ok(());
    }
    conn.execute(PREPARE).await?;
    for migration in missing {
        conn.execute(migration.sql.clone()).await?;
        sqlx::query(
            "
            insert into idempotency._sqlx_migrations (version, description, success, checksum, execution_time)
            values ($1::int8, $2::text, true, $3::bytea, -1)
            ",
        )
        .persistent(false)
        .bind(migration.version)
        .bind(&*migration.description)
        .bind(&*migration.checksum)
        .execute(&mut *conn)
        .await?;
    }
    Ok(())
}

/// One installer at a time: `if not exists` alone fails when two create at once.
///
/// It asks again and again, because a wait for the lock that ran out would abort the caller's transaction; and it sleeps on
/// the server, because a sleep here would ask for a runtime.
async fn lock(conn: &mut PgConnection) -> Result<(), Error> {
    let started = Instant::now();
    while !record::try_lock(conn, record::INSTALLER).await? {
        let waited = started.elapsed();
        if waited >= longest_wait(conn).await? {
            return Err(Error::MigrationLocked { holder: record::holder(conn, record::INSTALLER).await?, waited });
        }
        conn.execute("select pg_catalog.pg_sleep(0.05)").await?;
    }
    Ok(())
}

/// The caller's `lock_timeout` may shorten it; 0 is none.
async fn longest_wait(conn: &mut PgConnection) -> Result<Duration, Error> {
    let timeout =
        conn.fetch_one("select setting::int8 from pg_catalog.pg_settings where name = 'lock_timeout'").await?;
    Ok(match timeout.try_get::<i64, _>(0)?.unsigned_abs() {
        0 => LOCK_WAIT,
        milliseconds => LOCK_WAIT.min(Duration::from_millis(milliseconds)),
    })
}

/// Whether the schema is this release's.
pub(crate) async fn current(conn: &mut PgConnection) -> Result<(), Error> {
    match missing(conn).await?.first() {
        None => Ok(()),
        Some(migration) => Err(Error::SchemaMissing {
            source: sqlx::Error::Protocol(format!("migration {} is not applied", migration.version)),
        }),
    }
}

/// The migrations that are not recorded as applied. Plain SQL without parameters, which any pooler passes as one piece.
async fn missing(conn: &mut PgConnection) -> Result<Vec<&'static Migration>, Error> {
    let there = conn.fetch_one("select to_regclass('idempotency._sqlx_migrations') is not null").await?;
    if !there.try_get::<bool, _>(0)? {
        return Ok(MIGRATIONS.iter().collect());
    }
    // Its record says that it was created; somebody may have dropped it since.
    let dropped = conn.fetch_one("select to_regclass('idempotency.record') is null").await?;
    let applied = conn.fetch_all("select version, checksum from idempotency._sqlx_migrations where success").await?;
    let mut missing = Vec::new();
    for migration in MIGRATIONS.iter() {
        let mut checksum = None;
        for row in &applied {
            if row.try_get::<i64, _>(0)? == migration.version {
                checksum = Some(row.try_get::<Vec<u8>, _>(1)?);
            }
        }
        match checksum {
            None => missing.push(migration),
            Some(checksum) if checksum == *migration.checksum => {}
            Some(_) => {
                return Err(Error::Database(sqlx::Error::Migrate(Box::new(
                    sqlx::migrate::MigrateError::VersionMismatch(migration.version),
                ))));
            }
        }
    }
    if dropped.try_get(0)? && missing.is_empty() {
        return Err(Error::Database(sqlx::Error::Configuration(
            "idempotency._sqlx_migrations says that idempotency.record was created, and it is not there; \
             drop the schema idempotency and migrate again, or restore the table"
                .into(),
        )));
    }
    Ok(missing)
}
