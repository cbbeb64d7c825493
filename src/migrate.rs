//! Three ways to create the table: [`migrate`], [`MIGRATOR`] and [`schema_sql`]. The first two detect the table that
//! any of them has created; the SQL then fails. Also the functions of [`migrate_any_language`], and the triggers of
//! [`protect`].

mod protect;
mod trust;

use std::fmt::Write as _;
use std::sync::LazyLock;

#[cfg(feature = "testing")]
use sqlx::AssertSqlSafe;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{Executor, PgConnection, PgPool, SqlSafeStr as _};

use crate::error::sqlstate;
use crate::record::{self, Distribution};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, SetupError};

pub use crate::record::OnEscape;
pub use protect::{protect, unprotect};
pub(crate) use trust::{Standing, current, refusal, standing, trusted};

/// The table in which sqlx's migrator records the applied migrations. It is in the crate's schema, apart from the
/// application's.
const APPLIED: &str = "idempotency._sqlx_migrations";

/// All migrations, oldest first. A released migration is never edited, because databases record its checksum.
static MIGRATIONS: LazyLock<[Migration; 1]> = LazyLock::new(|| {
    [Migration::new(
        1,
        "create record".into(),
        MigrationType::Simple,
        include_str!("../migrations/0001_create_record.sql").into_sql_str(),
        false,
    )]
});

/// The SQL functions for callers in other languages. It can be run again, over those of any earlier release.
/// The name of the file has no underscore: sqlx would take it for a migration without a number.
const FUNCTIONS: &str = include_str!("../migrations/any-language.sql");

/// The migrations as an sqlx migrator, for `#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]` and for services that
/// run all migrations with sqlx.
///
/// It records applied migrations in `idempotency._sqlx_migrations` and never touches the application's own table. It
/// takes a session-level advisory lock, so it does not work through PgBouncer in transaction mode; [`migrate`] does.
/// The two take different locks. If both run at the same moment on an empty database, [`migrate`] tries again, and the
/// migrator may fail once.
///
/// Unlike [`migrate`], it sends `create schema if not exists` even if everything exists, so its role always needs the
/// right to create schemas. And it does not look at who owns the schema `idempotency`. A role that may create schemas
/// may have created it before you, and could then replace the crate's functions. If you do not trust every such role,
/// use [`migrate`].
///
/// Like [`migrate`], it ignores migrations of a newer release, so that old processes start on the new schema during a
/// roll-out.
///
/// It does not replace the functions of [`migrate_any_language`] that an earlier release has created. A service that
/// has them also calls [`migrate`] or [`migrate_any_language`].
pub static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| migrator(MIGRATIONS.to_vec()));

/// [`MIGRATOR`] with the SQL functions for callers in other languages, for
/// `#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]`. A database that outlives a test needs
/// [`migrate_any_language`], because this migrator does not replace the functions of an
/// earlier release.
#[cfg(feature = "testing")]
pub static ANY_LANGUAGE_MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations = MIGRATIONS.to_vec();
    // In the last migration, whose checksum remains, so that the database records what `migrate` would record.
    if let Some(last) = migrations.last_mut() {
        last.sql = AssertSqlSafe(format!("{}\n{FUNCTIONS}", last.sql.as_str())).into_sql_str();
    }
    migrator(migrations)
});

fn migrator(migrations: Vec<Migration>) -> Migrator {
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.create_schema("idempotency");
    migrator.dangerous_set_table_name(APPLIED);
    migrator.set_ignore_missing(true);
    migrator
}

/// Creates the schema `idempotency` and its table, or brings them up to date. If they are up to date, it does nothing,
/// and needs no more than the right to read the schema, so a service may call it at every start. It ignores migrations
/// of a newer release.
///
/// It is safe to call from many processes at once, through PgBouncer, and beside the application's own migrations. It
/// neither reads nor changes `search_path`. Functions of [`migrate_any_language`] that an earlier release has created
/// are replaced by those of this release. It waits for another session that migrates: for a minute, or for the
/// connection's `lock_timeout` if that is shorter. To migrate in a transaction of your own, run [`schema_sql`] without
/// its BEGIN and COMMIT.
///
/// ```no_run
/// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::SetupError> {
/// pg_idempotency::migrate(&pool).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// - [`Error::Database`] in [`SetupError::Other`], most often because the role may not create a schema: ask a DBA to
///   run [`schema_sql`].
/// - [`Incompatible::Schema`](crate::Incompatible::Schema), there too: the schema [cannot be
///   trusted](crate::operator::Warning::UntrustedSchema), an applied migration has another checksum than in this
///   release, the table is gone although its migration was applied, or it is there without the row of its migration, as
///   in a copy of the schema without its data. Nothing was changed.
/// - [`SetupError::Locked`] if another session holds the lock for longer than the wait.
///
/// # Cancellation
///
/// All of it is one transaction, done or not done.
pub async fn migrate(pool: &PgPool) -> Result<(), SetupError> {
    install(pool, false).await
}

/// As [`migrate`], and also creates the SQL functions for callers in other languages. Then each
/// [`migrate`] of a later release replaces them. If everything is up to date, this does nothing. The
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
/// As [`migrate`].
///
/// # Cancellation
///
/// All of it is one transaction, done or not done.
pub async fn migrate_any_language(pool: &PgPool) -> Result<(), SetupError> {
    install(pool, true).await
}

/// The SQL that [`migrate`] runs on an empty database, for a DBA to run. It is one transaction, and fails if the schema
/// `idempotency` exists already, whoever owns it. It also records the migrations as applied, so that [`migrate`] and
/// [`MIGRATOR`] find them applied.
#[must_use]
pub fn schema_sql() -> String {
    let mut sql = format!("begin;\n\n{SCHEMA};\n\n{TABLE_OF_APPLIED};\n\n");
    for migration in MIGRATIONS.iter() {
        let checksum = hex::encode(&migration.checksum);
        let _ = write!(
            sql,
            "{}\ninsert into {APPLIED} (version, description, success, checksum, execution_time)\n\
             values ({}, '{}', true, pg_catalog.decode('{checksum}', 'hex'), -1);\n\n",
            migration.sql.as_str(),
            migration.version,
            migration.description,
        );
    }
    sql.push_str("commit;\n");
    sql
}

/// The SQL that [`migrate_any_language`] runs after that of [`schema_sql`], for a DBA to run. It is
/// one transaction. It can be run again, over the functions of any earlier release.
#[must_use]
pub fn any_language_sql() -> String {
    format!("begin;\n\n{FUNCTIONS}\ncommit;\n")
}

/// Distributes the table by `scope` over the workers of Citus. If it is distributed so already, does nothing. Then set
/// [`Deployment::distributed`](crate::Deployment::distributed) in every process.
///
/// A business table that is written in the same transaction should have its rows beside the key: give it a column of
/// the type `text collate "C"` with the scope, and distribute it by that, `colocate_with => 'idempotency.record'`. Then
/// a call is one transaction on one worker. Every table that `perform` writes must be a distributed table, a reference
/// table, or local to Citus's metadata. A plain table of the coordinator commits apart from the key.
///
/// Apply `migrations/strict.sql` before, if at all: Citus does not take it in one statement. Stop the service
/// meanwhile: a process with the other setting gets [`Misuse::WrongDeployment`](crate::Misuse::WrongDeployment).
///
/// # Errors
///
/// - [`Error::SchemaMissing`]: run [`migrate`] before.
/// - [`SetupError::Refused`]: the database has no Citus, or the table is distributed in another way.
/// - [`Incompatible::Schema`](crate::Incompatible::Schema): the schema
///   [cannot be trusted](crate::operator::Warning::UntrustedSchema).
/// - [`SetupError::Locked`]: as of [`migrate`].
/// - [`Error::Database`]: Citus refuses, for example for want of workers or because the role is
///   not the owner.
///
/// # Cancellation
///
/// All of it is one transaction, done or not done.
pub async fn distribute(pool: &PgPool) -> Result<(), SetupError> {
    let refused = |why: &str| Err(SetupError::refused(why));
    in_pooled_transaction(pool, Opening::ReadCommitted, async |conn| {
        lock(conn).await?;
        current(conn).await?;
        match record::distribution(conn).await? {
            Distribution::By(column) if column == "scope" => Ok(()),
            Distribution::Plain => Ok(record::create_distributed_table(conn).await?),
            Distribution::NoCitus => refused("the database has no Citus; run `create extension citus` on every node"),
            Distribution::By(_) | Distribution::Other => {
                refused("Citus has idempotency.record, and not by the hash of scope; undistribute it first")
            }
        }
    })
    .await
}

async fn install(pool: &PgPool, any_language: bool) -> Result<(), SetupError> {
    let once = async || {
        in_pooled_transaction(pool, Opening::ReadCommitted, async |conn| apply(conn, any_language).await).await
    };
    // sqlx's migrator, which has a lock of its own, creates the schema and then the table. A stranger may create a
    // schema, too.
    for _ in 0..2 {
        match once().await {
            Err(SetupError::Other(Error::Database(error)))
                if matches!(
                    sqlstate(&error).as_deref(),
                    Some(sqlstate::UNIQUE_VIOLATION | sqlstate::DUPLICATE_SCHEMA | sqlstate::DUPLICATE_TABLE)
                ) => {}
            applied => return applied,
        }
    }
    match once().await {
        // Every way creates the table and records its migration in one transaction, so the row of a table that is there
        // is visible now.
        Err(SetupError::Other(Error::Database(error)))
            if sqlstate(&error).as_deref() == Some(sqlstate::DUPLICATE_TABLE) => {
            Err(refusal(
                "the table is there, but idempotency._sqlx_migrations does not record its migration, as in a copy of \
                          the schema without its data; run what `idempotency-janitor migrate --print` prints for the table \
                          idempotency._sqlx_migrations: its `create table if not exists` and its `insert`"
                    .to_owned(),
            )
            .into())
        }
        applied => applied,
    }
}

/// Without `if not exists`: it would install into the schema of a stranger, who could replace what is in it.
const SCHEMA: &str = "create schema idempotency";

/// sqlx's own definition, so that both ways of installing create the same table.
const TABLE_OF_APPLIED: &str = "create table if not exists idempotency._sqlx_migrations (
    version bigint primary key,
    description text not null,
    installed_on timestamptz not null default now(),
    success boolean not null,
    checksum bytea not null,
    execution_time bigint not null
)";

/// What a database lacks of this release.
struct Missing {
    schema: bool,
    migrations: Vec<&'static Migration>,
    /// The functions are wanted, or they are there and those of an earlier release.
    any_language: bool,
}

async fn apply(conn: &mut PgConnection, any_language: bool) -> Result<(), SetupError> {
    if let Missing { schema: false, migrations, any_language: false } = missing(conn, any_language).await?
        && migrations.is_empty()
    {
        return Ok(());
    }
    lock(conn).await?;
    let missing = missing(conn, any_language).await?;
    if missing.schema {
        // It fails if another role has created the schema since.
        conn.execute(SCHEMA).await?;
    }
    if !missing.migrations.is_empty() {
        conn.execute(TABLE_OF_APPLIED).await?;
    }
    for migration in missing.migrations {
        conn.execute(migration.sql.clone()).await?;
        sqlx::query(
            "
            insert into idempotency._sqlx_migrations (version, description, success, checksum, execution_time)
            values ($1::int8, $2::text, true, $3::bytea, -1)
            ",
        )
        .persistent(false)
        .bind(migration.version) // $1
        .bind(&*migration.description) // $2
        .bind(&*migration.checksum) // $3
        .execute(&mut *conn)
        .await?;
    }
    // The functions for other languages come last, because they call functions that the migrations create.
    if missing.any_language {
        conn.execute(FUNCTIONS).await?;
    }
    Ok(())
}

async fn missing(conn: &mut PgConnection, any_language: bool) -> Result<Missing, Error> {
    match standing(conn).await? {
        Standing::Nothing => Ok(Missing { schema: true, migrations: MIGRATIONS.iter().collect(), any_language }),
        standing => {
            let trusted = standing.trusted()?;
            Ok(Missing {
                schema: false,
                migrations: trusted.missing(conn).await?,
                any_language: trusted.has_older_functions() || any_language && !trusted.has_any_language(),
            })
        }
    }
}

/// Admits one installer at a time: `if not exists` alone fails when two sessions create at once. The limit of the wait
/// is also that of the migration's own locks.
async fn lock(conn: &mut PgConnection) -> Result<(), SetupError> {
    conn.execute(
        "
        select pg_catalog.set_config('lock_timeout', '60s', true)
        where pg_catalog.current_setting('lock_timeout')::interval not between interval '1 ms' and interval '60 s'
        ",
    )
    .await?;
    // ASCII for "pgidempo". Any role can take this lock.
    let locked = conn
        .execute("select /* pg_idempotency: migrate */ pg_catalog.pg_advisory_xact_lock(x'70676964656d706f'::int8)")
        .await;
    locked.map_err(|source| {
        let taken = sqlstate(&source).as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE);
        if taken { SetupError::Locked { source } } else { source.into() }
    })?;
    Ok(())
}
