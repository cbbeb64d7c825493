//! The statements about a distributed table as a whole: its distribution, its size, and its sweep. These statements are
//! plain SQL. The crate looks for the extension before it names the functions and catalogs of the extension.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{Executor as _, PgConnection, Row as _};

use crate::Error;
use crate::record::statement::{interval, no_live_lease, readable_place};
use crate::record::table::{Deleted, Size, could_be_retried};

/// Whether [`warn_if_plain`] has already looked at the table in this process.
static LOOKED: AtomicBool = AtomicBool::new(false);

/// How Citus distributes the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Distribution {
    /// The database has no Citus.
    NoCitus,
    /// The database has Citus, and the table is an ordinary one.
    Plain,
    /// Citus distributes the table by the hash of this column.
    By(String),
    /// Citus has the table in its metadata, but does not distribute it by a hash. An example is a reference table.
    Other,
}

/// A worker's settings.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    /// The host and port of the worker.
    pub(crate) node: String,
    /// The worker's `synchronous_commit`, and whether the worker has synchronous standbys. The `Err` is the reason why
    /// the worker did not answer.
    pub(crate) synchronous_commit: Result<(String, bool), String>,
}

/// Warns before the first claim of this process if the deployment is distributed, but the table is plain. The
/// statements for a distributed table are also right for a plain table, but slower. On a distributed table, the usual
/// statements fail by themselves, because each claim calls `idempotency.is_plain`.
pub(super) async fn warn_if_plain(conn: &mut PgConnection) -> Result<(), Error> {
    if LOOKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let distributed = is_distributed(conn).await?;
    if !LOOKED.swap(true, Ordering::Relaxed) && !distributed {
        tracing::warn!(
            "the deployment says that idempotency.record is distributed, and it is not; run \
             `idempotency-janitor migrate --distributed`, or turn Deployment::distributed off"
        );
    }
    Ok(())
}

pub(super) async fn is_distributed(conn: &mut PgConnection) -> Result<bool, Error> {
    Ok(matches!(distribution(conn).await?, Distribution::By(_)))
}

pub(crate) async fn distribution(conn: &mut PgConnection) -> Result<Distribution, Error> {
    // Each query is one message, because a call may be outside a transaction and behind a pooler.
    let citus =
        sqlx::raw_sql("select /* pg_idempotency: distribution */ from pg_catalog.pg_extension where extname = 'citus'")
            .fetch_optional(&mut *conn)
            .await
            .map_err(Error::of_statement)?;
    if citus.is_none() {
        return Ok(Distribution::NoCitus);
    }
    let table = sqlx::raw_sql(
        "
        select /* pg_idempotency: distribution */
            case when partmethod = 'h' then pg_catalog.column_to_column_name(logicalrelid, partkey) end
        from pg_catalog.pg_dist_partition
        where logicalrelid::oid = 'idempotency.record'::regclass::oid
        ",
    )
    .fetch_optional(conn)
    .await
    .map_err(Error::of_statement)?;
    let Some(table) = table else { return Ok(Distribution::Plain) };
    let column: Option<String> = table.try_get(0).map_err(Error::of_statement)?;
    Ok(column.map_or(Distribution::Other, Distribution::By))
}

/// Distributes the table by the column `scope`.
pub(crate) async fn create_distributed_table(conn: &mut PgConnection) -> Result<(), Error> {
    sqlx::query(
        "select /* pg_idempotency: distribute */ pg_catalog.create_distributed_table('idempotency.record', 'scope')",
    )
    .persistent(false)
    .execute(conn)
    .await
    .map(drop)
    .map_err(Error::of_statement)
}

/// The form of [`size`](crate::record::table::size) for a distributed table. The coordinator's own table is empty,
/// because the shards have the rows.
pub(super) async fn size(conn: &mut PgConnection) -> Result<Size, Error> {
    sqlx::query(
        "
        select /* pg_idempotency: size */
            sum((result::json ->> 0)::float8) as records,
            sum((result::json ->> 1)::int8)::int8 as table_bytes,
            sum((result::json ->> 2)::int8)::int8 as index_bytes,
            sum((result::json ->> 3)::int8)::int8 as dead_rows
        from pg_catalog.run_command_on_shards('idempotency.record', $$
            select pg_catalog.json_build_array(
                greatest(class.reltuples, 0), pg_catalog.pg_table_size(class.oid), pg_catalog.pg_indexes_size(class.oid),
                coalesce(stat.n_dead_tup, 0)
            )
            from pg_catalog.pg_class as class
            left join pg_catalog.pg_stat_all_tables as stat on stat.relid = class.oid
            where class.oid = '%s'::regclass::oid
        $$)
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| Size::of(&row))
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}

pub(crate) async fn workers(conn: &mut PgConnection) -> Result<Vec<Worker>, Error> {
    sqlx::query(
        "
        select /* pg_idempotency: workers */ nodename || ':' || nodeport::text as node, success, result
        from pg_catalog.run_command_on_workers($$
            select pg_catalog.current_setting('synchronous_commit')
                || case when pg_catalog.current_setting('synchronous_standby_names') <> '' then ' standbys' else '' end
        $$)
        order by 1
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| {
        let result: String = row.try_get("result")?;
        Ok(Worker {
            node: row.try_get("node")?,
            synchronous_commit: match (row.try_get("success")?, result.split_once(' ')) {
                (false, _) => Err(result),
                (true, Some((value, _))) => Ok((value.to_owned(), true)),
                (true, None) => Ok((result, false)),
            },
        })
    })
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}

/// Does the same as [`sweep`](crate::record::table::sweep), but without `ctid` and `for update skip locked`, which
/// Citus refuses. The statement deletes all due records up to the `expires_at` of the `limit`th due record.
///
/// Several records may share this `expires_at`, so the statement may delete more records than `limit`. If another
/// transaction has locked a record, the statement waits for at most a second, and then fails with SQLSTATE 55P03 (lock
/// not available). The owner may prolong the record during the wait. PostgreSQL then checks the condition again for the
/// new version of the row.
pub(super) async fn sweep(
    conn: &mut PgConnection,
    limit: u32,
    since: Option<DateTime<Utc>>,
    grace: Duration,
) -> Result<Deleted, Error> {
    conn.execute("set local citus.propagate_set_commands = 'local'; set local lock_timeout = '1s'")
        .await
        .map_err(Error::of_statement)?;
    let rows = sqlx::query(concat! {
        "
        delete /* pg_idempotency: sweep */ from idempotency.record
        where (expires_at <= pg_catalog.statement_timestamp() - $3::interval and ", no_live_lease!(), ")
            and expires_at >= coalesce($2::timestamptz, '-infinity')
            and expires_at <= (
                select max(due.expires_at)
                from (
                    select expires_at
                    from idempotency.record
                    where (expires_at <= pg_catalog.statement_timestamp() - $3::interval and ", no_live_lease!(), ")
                        and expires_at >= coalesce($2::timestamptz, '-infinity')
                    order by expires_at
                    limit $1::int8
                ) as due
            )
        returning
            mode = 'mark' as marks,
            mode <> 'mark' and completed_at is not null as completed,
            ", could_be_retried!(), " is true as retried,
            ", readable_place!("expires_at"), " as expires_at
        ",
    })
    .persistent(false)
    .bind(i64::from(limit)) // $1
    .bind(since) // $2
    .bind(interval(grace)) // $3
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    let mut deleted = Deleted::default();
    for row in rows {
        deleted.until = deleted.until.max(row.try_get("expires_at")?);
        match (row.try_get("marks")?, row.try_get("completed")?, row.try_get("retried")?) {
            (true, ..) => deleted.marks += 1,
            (_, true, _) => deleted.completed += 1,
            (.., true) => deleted.unfinished += 1,
            _ => deleted.indeterminate += 1,
        }
    }
    Ok(deleted)
}
