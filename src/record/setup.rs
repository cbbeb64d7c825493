//! The settings of the server, the roles and the table, from catalogs that every role may read.

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::Error;

/// The settings that decide whether the server keeps what it has acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) synchronous_commit: String,
    pub(crate) synchronous_standbys: bool,
    pub(crate) fsync: bool,
    pub(crate) unlogged: bool,
    pub(crate) in_recovery: bool,
}

/// A `synchronous_commit` with which sessions in this database start. `None` means all roles, or all databases.
#[derive(Clone, Debug)]
pub(crate) struct CommitSetting {
    pub(crate) role: Option<String>,
    pub(crate) database: Option<String>,
    pub(crate) value: String,
}

pub(crate) async fn setup(conn: &mut PgConnection) -> Result<Setup, Error> {
    sqlx::query(
        "
        select
            current_setting('synchronous_commit') as synchronous_commit,
            current_setting('synchronous_standby_names') <> '' as synchronous_standbys,
            current_setting('fsync')::bool as fsync,
            pg_catalog.pg_is_in_recovery() as in_recovery,
            class.relpersistence = 'u' as unlogged
        from pg_catalog.pg_class as class
        where class.oid = 'idempotency.record'::regclass
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| {
        Ok(Setup {
            synchronous_commit: row.try_get("synchronous_commit")?,
            synchronous_standbys: row.try_get("synchronous_standbys")?,
            fsync: row.try_get("fsync")?,
            in_recovery: row.try_get("in_recovery")?,
            unlogged: row.try_get("unlogged")?,
        })
    })
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}

/// Each `synchronous_commit` that `alter role` and `alter database` have set for a role that can log in to this
/// database. For a role without login it has no effect: neither `set role` nor membership applies a role's settings.
pub(crate) async fn commit_settings(conn: &mut PgConnection) -> Result<Vec<CommitSetting>, Error> {
    sqlx::query(
        "
        select
            role.rolname::text as role,
            base.datname::text as database,
            pg_catalog.lower(setting.option_value) as value
        from pg_catalog.pg_db_role_setting as per
        cross join lateral pg_catalog.pg_options_to_table(per.setconfig) as setting
        left join pg_catalog.pg_roles as role on role.oid = per.setrole
        left join pg_catalog.pg_database as base on base.oid = per.setdatabase
        where setting.option_name = 'synchronous_commit'
            and (per.setrole = 0 or role.rolcanlogin)
            and (per.setdatabase = 0 or base.datname = current_database())
        order by role.rolname, base.datname
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| {
        Ok(CommitSetting {
            role: row.try_get("role")?,
            database: row.try_get("database")?,
            value: row.try_get("value")?,
        })
    })
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}
