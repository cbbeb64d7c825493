//! The settings of the server, the roles and the table, from catalogs that every role may read.

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::Error;

/// The settings that decide whether the server keeps what it has acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) synchronous_standbys: bool,
    pub(crate) fsync: bool,
    pub(crate) unlogged: bool,
    pub(crate) in_recovery: bool,
}

/// A `synchronous_commit`, and for whom it is.
#[derive(Clone, Debug)]
pub(crate) struct CommitSetting {
    pub(crate) value: String,
    pub(crate) whose: String,
}

pub(crate) async fn setup(conn: &mut PgConnection) -> Result<Setup, Error> {
    sqlx::query(
        "
        select /* pg_idempotency: setup */
            pg_catalog.current_setting('synchronous_standby_names') <> '' as synchronous_standbys,
            pg_catalog.current_setting('fsync')::bool as fsync,
            pg_catalog.pg_is_in_recovery() as in_recovery,
            class.relpersistence = 'u' as unlogged
        from pg_catalog.pg_class as class
        where class.oid = 'idempotency.record'::regclass::oid
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| {
        Ok(Setup {
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

/// The tables of the crate, and their partitions, to which row level security applies for this role. It needs no right,
/// and no schema.
pub(crate) async fn with_hidden_rows(conn: &mut PgConnection) -> Result<Vec<String>, Error> {
    let mut tables = sqlx::query(
        "
        select /* pg_idempotency: hidden rows */ class.oid::regclass::text as name
        from pg_catalog.pg_class as class
        where class.relrowsecurity
            and pg_catalog.row_security_active(class.oid)
            and (class.oid = pg_catalog.to_regclass('idempotency._sqlx_migrations')::oid
                -- A sweep names the leaf itself, and then the policies of the leaf apply.
                or class.oid = pg_catalog.to_regclass('idempotency.record')::oid
                or class.oid in (
                    select tree.relid::oid
                    from pg_catalog.pg_partition_tree(pg_catalog.to_regclass('idempotency.record')) as tree
                ))
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| row.try_get::<String, _>("name"))
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    tables.sort_unstable();
    Ok(tables)
}

/// The `synchronous_commit` of this connection, and each that `alter role` and `alter database` have set for a role
/// that can log in to this database. For a role without login it has no effect: neither `set role` nor membership
/// applies a role's settings.
pub(crate) async fn commit_settings(conn: &mut PgConnection) -> Result<Vec<CommitSetting>, Error> {
    sqlx::query(
        "
        select /* pg_idempotency: commit settings */
            pg_catalog.current_setting('synchronous_commit') as value, 'for this connection' as whose
        union all
        select
            pg_catalog.lower(setting.option_value),
            'for ' || coalesce('role \"' || role.rolname::text || '\"', 'all roles')
                || ' in ' || coalesce('database \"' || base.datname::text || '\"', 'all databases')
        from pg_catalog.pg_db_role_setting as per
        cross join lateral pg_catalog.pg_options_to_table(per.setconfig) as setting
        left join pg_catalog.pg_roles as role on role.oid = per.setrole
        left join pg_catalog.pg_database as base on base.oid = per.setdatabase
        where setting.option_name = 'synchronous_commit'
            and (per.setrole = 0::oid or role.rolcanlogin)
            and (per.setdatabase = 0::oid or base.datname = pg_catalog.current_database())
        order by whose
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| Ok(CommitSetting { value: row.try_get("value")?, whose: row.try_get("whose")? }))
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}
