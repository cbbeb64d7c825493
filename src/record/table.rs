//! Statements about the whole table. The sweep deletes records after their retention, a batch at a time. Other
//! statements read the size of the table, the counts of its records, and the settings on which the table depends.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use super::statement::{
    self, interval, may_be_retried, no_live_lease, readable, readable_position, state, table_or_leaf,
};
use crate::Error;
use crate::state::State;

/// The numbers of records that one batch deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deleted {
    pub(crate) completed: u64,
    pub(crate) unfinished: u64,
    pub(crate) indeterminate: u64,
    pub(crate) marks: u64,
    /// The latest `expires_at` among the deleted records. The next batch of the pass searches the index from this value
    /// on. Otherwise the next batch would walk over the index entries of all rows that the pass has deleted, because
    /// these entries stay until a vacuum removes them.
    pub(crate) until: Option<DateTime<Utc>>,
}

impl Deleted {
    pub(crate) fn rows(&self) -> u64 {
        self.completed + self.unfinished + self.indeterminate + self.marks
    }

    /// The counts with their names.
    pub(crate) fn kinds(&self) -> [(&'static str, u64); 4] {
        [
            ("completed", self.completed),
            ("unfinished", self.unfinished),
            ("indeterminate", self.indeterminate),
            ("marks", self.marks),
        ]
    }
}

/// A part of the table that is swept separately: a leaf of a partitioned table, or the table itself. The server has
/// quoted the name.
#[derive(Clone, Debug)]
pub(crate) struct Part(String);

impl Part {
    pub(crate) async fn all(conn: &mut PgConnection) -> Result<Vec<Self>, Error> {
        sqlx::query_scalar(concat! {
            "
            select /* pg_idempotency: leaves */ pg_catalog.format('%I.%I', namespace.nspname, class.relname)
            from pg_catalog.pg_class as class
            join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
            where class.relkind <> 'p' and ", table_or_leaf!(), "
            order by class.oid
            ",
        })
        .persistent(false)
        .fetch_all(conn)
        .await
        .map(|leaves| leaves.into_iter().map(Self).collect())
        .map_err(Error::of_statement)
    }

    /// Deletes at most `limit` due records, the oldest first. A record is due if its retention ended at least `grace`
    /// ago, and if it has no live lease. `since` is the [`Deleted::until`] of the previous batch.
    ///
    /// The sweep skips a row that another transaction has locked, for example to take it over. The next pass deletes
    /// this row if it is still due. A batch that selects by primary key instead of `ctid` would be five times slower.
    ///
    /// If another transaction moves a row's `expires_at` to a time before `since`, only the next pass deletes this row.
    pub(crate) async fn sweep(
        &self,
        conn: &mut PgConnection,
        limit: u32,
        since: Option<DateTime<Utc>>,
        grace: Duration,
    ) -> Result<Deleted, Error> {
        // The statement is not a literal, because it has to name a leaf. On the parent table, the plan would read all
        // leaves, whatever the condition is.
        let sql = format!(
            concat! {
                "
            with /* pg_idempotency: sweep */ deleted as (
                delete from {leaf}
                -- An array, because `in (select … limit)` may run the select once for each outer row, and then delete more.
                where ctid = any (array(
                        select ctid
                        from {leaf}
                        where (expires_at <= pg_catalog.statement_timestamp() - $3::interval and ", no_live_lease!(), ")
                            and expires_at >= coalesce($2::timestamptz, '-infinity')
                        order by expires_at
                        limit $1::int8
                        for update skip locked
                    ))
                    -- The condition is repeated: it must be true for the row version that is deleted, not for the selected
                    -- one.
                    and (expires_at <= pg_catalog.statement_timestamp() - $3::interval and ", no_live_lease!(), ")
                returning mode, completed_at, lease_until, expires_at, steps
            )
            select
                count(*) filter (where mode <> 'mark' and completed_at is not null) as completed,
                count(*) filter (where completed_at is null) as open,
                count(*) filter (where ", may_be_retried!(), ") as unfinished,
                count(*) filter (where mode = 'mark') as marks, ", readable_position!("max(expires_at)"), " as until
            from deleted
            "
            },
            leaf = self.0
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(false)
            .bind(i64::from(limit)) // $1
            .bind(since) // $2
            .bind(interval(grace)) // $3
            .try_map(|row: PgRow| {
                let count = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
                let unfinished = count("unfinished")?;
                Ok(Deleted {
                    completed: count("completed")?,
                    unfinished,
                    indeterminate: count("open")? - unfinished,
                    marks: count("marks")?,
                    until: row.try_get("until")?,
                })
            })
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)
    }
}

/// How long ago the oldest due record expired. `None` if no record is due.
pub(crate) async fn oldest_due(conn: &mut PgConnection, grace: Duration) -> Result<Option<Duration>, Error> {
    let seconds: Option<f64> = sqlx::query_scalar(concat! {
        "
        select /* pg_idempotency: oldest due */ extract(epoch from
            pg_catalog.statement_timestamp()
            -- The column may have been set to -infinity by hand: count from the claim.
            - case when pg_catalog.isfinite(expires_at) then expires_at else ", readable!("claimed_at"), " end)::float8
        from idempotency.record
        where (expires_at <= pg_catalog.statement_timestamp() - $1::interval and ", no_live_lease!(), ")
        order by expires_at
        limit 1
        ",
    })
    .persistent(false)
    .bind(interval(grace)) // $1
    .fetch_optional(conn)
    .await
    .map_err(Error::of_statement)?;
    Ok(seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()))
}

/// The sizes and counts that the server keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// The number of records, as the last ANALYZE or VACUUM has estimated it.
    pub(crate) records: f64,
    pub(crate) table_bytes: i64,
    pub(crate) index_bytes: i64,
    pub(crate) dead_rows: i64,
}

impl Size {
    pub(super) fn of(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            records: row.try_get("records")?,
            table_bytes: row.try_get("table_bytes")?,
            index_bytes: row.try_get("index_bytes")?,
            dead_rows: row.try_get("dead_rows")?,
        })
    }
}

/// The records of one mode and one operation, in one state.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Group {
    /// The mode, which may be a mode of a newer release.
    pub mode: String,
    /// The operation.
    pub operation: String,
    /// The state.
    pub state: State,
    /// The number of records.
    pub records: u64,
    /// When the oldest of these records was claimed.
    pub oldest: DateTime<Utc>,
}

/// Reads the sizes and counts that the server keeps. For a partitioned table, the values are sums over its leaves.
pub(super) async fn size(conn: &mut PgConnection) -> Result<Size, Error> {
    sqlx::query(concat! {
        "
        select /* pg_idempotency: size */
            greatest(sum(class.reltuples), 0)::float8 as records,
            sum(pg_catalog.pg_table_size(class.oid))::int8 as table_bytes,
            sum(pg_catalog.pg_indexes_size(class.oid))::int8 as index_bytes,
            coalesce(sum(stat.n_dead_tup), 0)::int8 as dead_rows
        from pg_catalog.pg_class as class
        left join pg_catalog.pg_stat_all_tables as stat on stat.relid = class.oid
        where ", table_or_leaf!(), "
        ",
    })
    .persistent(false)
    .try_map(|row: PgRow| Size::of(&row))
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}

/// Counts the records by mode, operation and state. Reads `percent` percent of the table's pages, and scales the counts
/// up to the whole table.
pub(crate) async fn groups(conn: &mut PgConnection, percent: f64) -> Result<Vec<Group>, Error> {
    sqlx::query(concat! {
        "
        select /* pg_idempotency: stats */
            mode,
            operation,
            ", state!(), " as state,
            count(*) as records,
            ", readable!("min(claimed_at)"), " as oldest
        from idempotency.record tablesample system ($1::float4)
        group by 1, 2, 3
        order by 2, 3, 1
        ",
    })
    .persistent(false)
    .bind(percent as f32) // $1
    .try_map(|row: PgRow| {
        let records: i64 = row.try_get("records")?;
        Ok(Group {
            mode: row.try_get("mode")?,
            operation: row.try_get("operation")?,
            state: statement::state_of(&row)?,
            records: (records as f64 * (100.0 / percent)).round() as u64,
            oldest: row.try_get("oldest")?,
        })
    })
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}

/// The settings that decide whether the server keeps what it has acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) synchronous_standbys: bool,
    pub(crate) fsync: bool,
    pub(crate) unlogged: bool,
    pub(crate) in_recovery: bool,
}

/// A value of `synchronous_commit`, and a text that names the sessions with this value.
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

/// The tables and partitions of the crate in which row level security applies to this role. The statement needs no
/// privilege, and succeeds if the schema does not exist.
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

/// The `synchronous_commit` of this connection, and each value that `alter role` or `alter database` has set for logins
/// to this database. A value for a role without login is left out, because it has no effect. Neither `set role` nor the
/// membership in a role applies the settings of the role.
pub(crate) async fn commit_settings(conn: &mut PgConnection) -> Result<Vec<CommitSetting>, Error> {
    sqlx::query(
        "
        select /* pg_idempotency: commit settings */
            pg_catalog.current_setting('synchronous_commit') as value, 'for this connection' as whose
        union all
        select
            -- Of the letters A to Z, in every locale.
            pg_catalog.lower(setting.option_value collate pg_catalog.\"C\"),
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
