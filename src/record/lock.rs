//! The advisory lock of the installer, whose number is fixed. Any role can take it, so the wait for it has a limit.

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::{Error, LockHolder};

/// ASCII for "pgidempo": one installer at a time.
pub(crate) const INSTALLER: i64 = i64::from_be_bytes(*b"pgidempo");

/// Takes the lock until the end of the transaction. `false` means that another session has it.
pub(crate) async fn try_lock(conn: &mut PgConnection, lock: i64) -> Result<bool, Error> {
    sqlx::query_scalar("select pg_catalog.pg_try_advisory_xact_lock($1::int8)")
        .persistent(false)
        .bind(lock) // $1
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
}

/// The session that has the lock; `None` if it has ended meanwhile. Every role may see process, role and application of
/// every session.
pub(crate) async fn holder(conn: &mut PgConnection, lock: i64) -> Result<Option<LockHolder>, Error> {
    sqlx::query(
        "
        select held.pid, session.usename::text as role, session.application_name as application
        from pg_catalog.pg_locks as held
        left join pg_catalog.pg_stat_activity as session on session.pid = held.pid
        where held.locktype = 'advisory' and held.granted
            and held.database = (select oid from pg_catalog.pg_database where datname = current_database())
            -- A lock of one number has its halves in two columns, and 1 in the third.
            and held.classid::int8 = $1::int8 >> 32 and held.objid::int8 = $1::int8 & 4294967295 and held.objsubid = 1
            and held.pid <> pg_backend_pid()
        limit 1
        ",
    )
    .persistent(false)
    .bind(lock) // $1
    .try_map(|row: PgRow| {
        Ok(LockHolder {
            pid: row.try_get("pid")?,
            role: row.try_get("role")?,
            application: row.try_get::<Option<String>, _>("application")?.filter(|name| !name.is_empty()),
        })
    })
    .fetch_optional(conn)
    .await
    .map_err(Error::of_statement)
}
