//! The tables of the service that are written inside idempotent operations only. The functions of the migration create
//! the triggers; the catalogs tell which tables have them.

use std::collections::BTreeMap;

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::error::sqlstate;
use crate::{Error, SetupError};

/// What the database does with a write to a protected table that is outside an idempotent operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnEscape {
    /// The statement fails with the SQLSTATE `IK006`, and writes nothing.
    Refuse,
    /// The statement succeeds with a WARNING `IK006`, for the time in which such places are looked for. sqlx logs it
    /// under the target `sqlx::postgres::notice`, and the server in its own log.
    Warn,
}

pub(crate) async fn protect(conn: &mut PgConnection, table: &str, on_escape: OnEscape) -> Result<(), SetupError> {
    let word = match on_escape {
        OnEscape::Refuse => "refuse",
        OnEscape::Warn => "warn",
    };
    let call = sqlx::query("select /* pg_idempotency: protect */ idempotency.protect($1::text::regclass, $2::text)")
        .bind(table)
        .bind(word);
    call.persistent(false).execute(conn).await.map(drop).map_err(|error| refused(table, error))
}

pub(crate) async fn unprotect(conn: &mut PgConnection, table: &str) -> Result<(), SetupError> {
    let call =
        sqlx::query("select /* pg_idempotency: unprotect */ idempotency.unprotect($1::text::regclass)").bind(table);
    call.persistent(false).execute(conn).await.map(drop).map_err(|error| refused(table, error))
}

/// The schema is current, so a relation that is missing is the caller's.
fn refused(table: &str, error: sqlx::Error) -> SetupError {
    let problem = match (sqlstate(&error).as_deref(), error.as_database_error()) {
        (Some(sqlstate::NOT_PROTECTED), Some(refusal)) => refusal.message().to_owned(),
        (
            Some(
                sqlstate::UNDEFINED_TABLE
                | sqlstate::INVALID_SCHEMA_NAME
                | sqlstate::INVALID_NAME
                | sqlstate::SYNTAX_ERROR
                | sqlstate::FEATURE_NOT_SUPPORTED,
            ),
            _,
        ) => format!(
            "there is no table {table:?} to protect; name it as SQL does, with its schema and its quotes, such as public.\"Orders\""
        ),
        (Some(sqlstate::INSUFFICIENT_PRIVILEGE), _) => format!(
            "the role may not protect the table {table:?}; do it as the owner of the table, with usage on its schema and on the \
             schema idempotency"
        ),
        _ => return Error::of_statement(error).into(),
    };
    SetupError::Refused { problem, source: Some(error) }
}

/// The condition of the migration, as the server writes it, without the quotes of `quote_all_identifiers`.
const CONDITION: &str = "(COALESCE(current_setting('idempotency.claim'::text, true), ''::text) = ''::text)";

/// A trigger that lets no write escape: before each statement, for all four kinds and all columns, with the condition
/// and an argument of the migration. One that somebody made by hand may fire less often. `idempotency.is_protected`
/// asks the same question. `$1` is [`CONDITION`].
macro_rules! is_whole {
    () => {
        "(guard.tgtype = 62::int2
            and guard.tgattr::text = ''
            and guard.tgargs in (pg_catalog.decode('7761726e00', 'hex'), ''::bytea)
            and pg_catalog.replace(pg_catalog.pg_get_expr(guard.tgqual, guard.tgrelid), '\"', '')
                is not distinct from $1::text)"
    };
}

/// The protected tables by name. A partition counts as a part of its table.
pub(crate) async fn protected(conn: &mut PgConnection) -> Result<BTreeMap<String, OnEscape>, Error> {
    let tables = sqlx::query(concat! {
        "
        select /* pg_idempotency: protected */
            pg_catalog.format('%I.%I', space.nspname, class.relname) as table, guard.tgnargs = 1 as warns
        from pg_catalog.pg_trigger as guard
        join pg_catalog.pg_class as class on class.oid = guard.tgrelid
        join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
        where guard.tgfoid = 'idempotency.on_escape'::regproc::oid
            and ", is_whole!(), "
            and not exists (
                select
                from pg_catalog.pg_inherits
                join pg_catalog.pg_trigger as above on above.tgrelid = inhparent and above.tgfoid = guard.tgfoid
                where inhrelid = guard.tgrelid
            )
        ",
    })
    .persistent(false)
    .bind(CONDITION) // $1
    .try_map(|row: PgRow| {
        let warns: bool = row.try_get("warns")?;
        Ok((row.try_get("table")?, if warns { OnEscape::Warn } else { OnEscape::Refuse }))
    })
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    Ok(tables.into_iter().collect())
}

/// The protected tables and partitions whose trigger is disabled or not [whole](is_whole), and the partitions without
/// one.
pub(crate) async fn gaps(conn: &mut PgConnection) -> Result<Vec<String>, Error> {
    sqlx::query_scalar(concat! {
        "
        with /* pg_idempotency: gaps */ guard as (
            -- 'R' fires for a replication only.
            select guard.tgrelid, pg_catalog.bool_or(guard.tgenabled in ('O', 'A') and ", is_whole!(), ") as works
            from pg_catalog.pg_trigger as guard
            where guard.tgfoid = 'idempotency.on_escape'::regproc::oid
            group by guard.tgrelid
        ),
        covered (oid) as (
            select distinct part from guard cross join lateral idempotency.with_partitions(guard.tgrelid) as part
        )
        select pg_catalog.format('%I.%I', space.nspname, class.relname)
        from covered
        left join guard on guard.tgrelid = covered.oid
        join pg_catalog.pg_class as class on class.oid = covered.oid
        join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
        where guard.tgrelid is null or not guard.works
        order by 1
        ",
    })
    .persistent(false)
    .bind(CONDITION) // $1
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}
