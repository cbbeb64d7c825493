//! Three ways to create the table: [`migrate`], [`MIGRATOR`] and [`schema_sql`]. [`migrate`] and [`MIGRATOR`] detect an
//! existing table, whichever way has created the table. The SQL of [`schema_sql`] fails if the table exists. The module
//! also contains the functions of [`migrate_any_language`], and the triggers of [`protect`].

mod protect;
mod trust;

use std::fmt::Write as _;
use std::sync::LazyLock;

#[cfg(feature = "testing")]
use sqlx::AssertSqlSafe;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{Executor, PgConnection, PgPool, SqlSafeStr as _};

use crate::error::sqlstate;
use crate::record::Opening;
use crate::session::in_pooled_transaction;
use crate::{Error, SetupError, record};

pub use crate::record::OnEscape;
pub use protect::{protect, unprotect};
pub(crate) use trust::{Standing, current, refusal, revoke_rights, standing, trusted};

/// The table in which sqlx's migrator records the applied migrations. The table is in the crate's schema, separate from
/// the application's own table.
const APPLIED: &str = "idempotency._sqlx_migrations";

/// All migrations, with the oldest migration first. A released migration is never edited, because databases record its
/// checksum.
static MIGRATIONS: LazyLock<[Migration; 1]> = LazyLock::new(|| {
    [Migration::new(
        1,
        "create record".into(),
        MigrationType::Simple,
        include_str!("../migrations/0001_create_record.sql").into_sql_str(),
        false,
    )]
});

/// The SQL that creates the functions for callers in other languages. The SQL can be run again, and replaces the
/// functions of any earlier release. The name of the file has no underscore, because sqlx would otherwise take the file
/// for a migration without a number.
const FUNCTIONS: &str = include_str!("../migrations/any-language.sql");

/// The migrations as an sqlx migrator, for `#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]` and for services that
/// run all migrations with sqlx.
///
/// The migrator records applied migrations in `idempotency._sqlx_migrations`, and never touches the application's own
/// table of migrations. The migrator takes a session-level advisory lock, so the migrator does not work through
/// PgBouncer in transaction mode. [`migrate`] does work there. The migrator and [`migrate`] take different locks. If
/// both run at the same moment on an empty database, [`migrate`] tries again, and the migrator may fail once.
///
/// Unlike [`migrate`], the migrator sends `create schema if not exists` even if everything exists, so its role always
/// needs the right to create schemas. The migrator also checks neither the `search_path` of its role, nor the owner of
/// the schema `idempotency`. Another role that may create schemas may have created this schema before you, and could
/// then replace the crate's functions. If you do not trust every role that may create schemas, use [`migrate`].
///
/// Like [`migrate`], the migrator ignores migrations of a newer release, so that old processes can start on the new
/// schema during a roll-out.
///
/// The migrator does not replace functions that [`migrate_any_language`] of an earlier release has created. A service
/// with these functions also calls [`migrate`] or [`migrate_any_language`].
pub static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| migrator(MIGRATIONS.to_vec()));

/// [`MIGRATOR`] with the SQL functions for callers in other languages, for
/// `#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]`. A database that outlives a test needs
/// [`migrate_any_language`], because this migrator does not replace the functions of an
/// earlier release.
#[cfg(feature = "testing")]
pub static ANY_LANGUAGE_MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations = MIGRATIONS.to_vec();
    // The functions are appended to the last migration, whose checksum remains the same. So the database records the
    // same migrations as after `migrate`.
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

/// Creates the schema `idempotency` and its table, or brings both up to date. If the schema is up to date, the call
/// does nothing, and needs only the right to read the schema. A service may therefore call `migrate` at every start.
/// Migrations of a newer release are ignored.
///
/// Many processes may call `migrate` at once, through PgBouncer, and beside the application's own migrations. `migrate`
/// replaces functions that [`migrate_any_language`] of an earlier release has created. If default privileges give an
/// untrusted role the right to add code to the new schema, the call revokes this right. If another session is
/// migrating, the call waits for a minute, or for the connection's `lock_timeout` if that is shorter. To migrate in a
/// transaction of your own, run [`schema_sql`] without its BEGIN and COMMIT.
///
/// The call works with each `search_path`, and does not change it, with one exception: if the path of the role would
/// contain the new schema, the call refuses to create it. The path of a role named `idempotency` does so by default,
/// and the tables of the service would get into the crate's schema. If the schema exists already, the call logs a
/// WARNING instead.
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
/// - [`Error::Database`] in [`SetupError::Other`], most often because the role may not create a schema. In this case,
///   ask a DBA to run [`schema_sql`].
/// - [`Incompatible::Schema`](crate::Incompatible::Schema), also in [`SetupError::Other`], if the schema [cannot be
///   trusted](crate::operator::Warning::UntrustedSchema), or if an applied migration has another checksum than in this
///   release. Three other causes of this error are a table that is gone although its migration was applied, a table
///   without the row of its migration, as in a copy of the schema without its data, and a `search_path` that would
///   contain the new schema. The call changed nothing.
/// - [`SetupError::Locked`] if another session holds the lock for longer than the wait.
///
/// # Cancellation
///
/// The whole call is one transaction, which takes effect completely or not at all.
pub async fn migrate(pool: &PgPool) -> Result<(), SetupError> {
    install(pool, false).await
}

/// Does the same as [`migrate`], and also creates the SQL functions for callers in other languages. Each [`migrate`] of
/// a later release then replaces these functions. If everything is up to date, the call does nothing. The guide's page
/// `any_language` describes the functions.
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
/// The whole call is one transaction, which takes effect completely or not at all.
pub async fn migrate_any_language(pool: &PgPool) -> Result<(), SetupError> {
    install(pool, true).await
}

/// Returns the SQL that [`migrate`] runs on an empty database, so that a DBA can run it. The SQL is one transaction.
/// The SQL fails if the schema `idempotency` exists already, under any owner. The SQL also records the migrations as
/// applied, so that [`migrate`] and [`MIGRATOR`] do not apply them again.
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

/// Returns the SQL that [`migrate_any_language`] runs after the SQL of [`schema_sql`], so that a DBA can run it. The
/// SQL is one transaction. The SQL can be run again, and replaces the functions of any earlier release.
#[must_use]
pub fn any_language_sql() -> String {
    format!("begin;\n\n{FUNCTIONS}\ncommit;\n")
}

async fn install(pool: &PgPool, any_language: bool) -> Result<(), SetupError> {
    let once = async || {
        in_pooled_transaction(pool, Opening::READ_COMMITTED, async |conn| apply(conn, any_language).await).await
    };
    // sqlx's migrator takes a different lock, so it may run at the same time as this call. The migrator creates first
    // the schema, then the table, and this call may lose a race for each of them. An untrusted role may also create the
    // schema at the same time. After an error from such a race, the call tries again.
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
        // Each way to create the table also records its migration in the same transaction. So if the third try also
        // fails on the existing table, the cause is not a race, and the row of the migration is missing.
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

/// The statement has no `if not exists`, because with this clause, the crate would install into a schema that an
/// untrusted role has created. The owner of a schema could replace everything in the schema.
const SCHEMA: &str = "create schema idempotency";

/// The definition is a copy of sqlx's own definition, so that [`migrate`], [`schema_sql`] and sqlx's migrator create
/// the same table.
const TABLE_OF_APPLIED: &str = "create table if not exists idempotency._sqlx_migrations (
    version bigint primary key,
    description text not null,
    installed_on timestamptz not null default now(),
    success boolean not null,
    checksum bytea not null,
    execution_time bigint not null
)";

/// The parts of this release that a database lacks.
struct Missing {
    schema: bool,
    migrations: Vec<&'static Migration>,
    /// Whether the functions for other languages must be created or replaced.
    any_language: bool,
    /// Whether the `search_path` of the current role contains the schema that exists.
    in_search_path: bool,
}

async fn apply(conn: &mut PgConnection, any_language: bool) -> Result<(), SetupError> {
    let found = missing(conn, any_language).await?;
    if found.in_search_path {
        tracing::warn!("{IN_SEARCH_PATH}; {OUT_OF_SEARCH_PATH}");
    }
    if !found.schema && found.migrations.is_empty() && !found.any_language {
        return Ok(());
    }
    lock(conn).await?;
    let missing = missing(conn, any_language).await?;
    if missing.schema {
        // The statement fails if another role has created the schema in the meantime.
        conn.execute(SCHEMA).await?;
        // Only now does `"$user"` of a role with this name find the schema. The error undoes the creation.
        if record::schema(conn).await?.is_some_and(|created| created.in_search_path) {
            return Err(refusal(format!("{IN_SEARCH_PATH}; nothing was created; {OUT_OF_SEARCH_PATH}")).into());
        }
    }
    if !missing.migrations.is_empty() {
        conn.execute(TABLE_OF_APPLIED).await?;
    }
    let has_created = !missing.migrations.is_empty();
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
    if has_created {
        revoke_rights(conn).await?;
    }
    // The functions for other languages come last, because these functions call functions that the migrations create.
    if missing.any_language {
        conn.execute(FUNCTIONS).await?;
    }
    Ok(())
}

/// Why the schema must not be in the `search_path` of a role that creates tables.
pub(crate) const IN_SEARCH_PATH: &str = "the search_path of this role contains the schema idempotency, as \"$user\" \
    does for a role of this name, so tables that the service creates without the name of a schema get into the crate's \
    schema, and its sqlx migrations are recorded in the crate's table";
pub(crate) const OUT_OF_SEARCH_PATH: &str = "rename the role, or give it another path, such as `alter role idempotency \
    set search_path = public`, and connect again";

async fn missing(conn: &mut PgConnection, any_language: bool) -> Result<Missing, Error> {
    match standing(conn).await? {
        Standing::Nothing => {
            Ok(Missing { schema: true, migrations: MIGRATIONS.iter().collect(), any_language, in_search_path: false })
        }
        standing => {
            let trusted = standing.trusted()?;
            Ok(Missing {
                schema: false,
                migrations: trusted.missing(conn).await?,
                any_language: trusted.has_older_functions() || any_language && !trusted.has_any_language(),
                in_search_path: trusted.is_in_search_path(),
            })
        }
    }
}

/// Admits one installer at a time, because `if not exists` alone fails when two sessions create a table at once. The
/// `lock_timeout` of this wait also applies to the later locks of the migration.
async fn lock(conn: &mut PgConnection) -> Result<(), SetupError> {
    conn.execute(
        "
        select pg_catalog.set_config('lock_timeout', '60s', true)
        where pg_catalog.current_setting('lock_timeout')::interval not between interval '1 ms' and interval '60 s'
        ",
    )
    .await?;
    // The number is ASCII for "pgidempo". Any role can take this lock.
    let locked = conn
        .execute("select /* pg_idempotency: migrate */ pg_catalog.pg_advisory_xact_lock(x'70676964656d706f'::int8)")
        .await;
    locked.map_err(|source| {
        let taken = sqlstate(&source).as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE);
        if taken { SetupError::Locked { source } } else { source.into() }
    })?;
    Ok(())
}
