//! Deleting what is past its retention, and counting it.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::types::Oid;
use sqlx::{PgConnection, Row as _};

use super::statement::interval;
use crate::Error;

/// What one batch deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) completed: u64,
    pub(crate) unfinished: u64,
    pub(crate) marks: u64,
}

/// What is due, by kind: what batches would delete.
pub(crate) type Due = Batch;

impl Batch {
    pub(crate) fn rows(&self) -> u64 {
        self.completed + self.unfinished + self.marks
    }

    fn of(row: &sqlx::postgres::PgRow) -> sqlx::Result<Self> {
        let count = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
        Ok(Self { completed: count("completed")?, unfinished: count("unfinished")?, marks: count("marks")? })
    }
}

/// Deletes at most `limit` records that are past their retention by the `grace` and under no live lease, oldest first.
///
/// Rows that somebody is taking over are skipped, and the predicate stands outside once more: the row version that is
/// deleted is judged, not the one that was selected. By `ctid` and an array, because `in (select … limit)` may run the
/// select once for each outer row, and then deletes more than the limit. A `ctid` is unique within a leaf only: where the
/// table is partitioned, `leaf` names one.
///
/// `since` is where the batch before left off, and the second value where this one did. Without it each batch of a pass walks
/// over the index entries of all rows that the earlier ones have deleted, until a vacuum removes them. A row that was locked,
/// or that committed an earlier end meanwhile, is the next pass's.
pub(crate) async fn sweep(
    conn: &mut PgConnection,
    leaf: Option<u32>,
    limit: u32,
    since: Option<DateTime<Utc>>,
    grace: Duration,
) -> Result<(Batch, Option<DateTime<Utc>>), Error> {
    sqlx::query(
        "
        with deleted as (
            delete from idempotency.record
            where ctid = any (array(
                    select ctid
                    from idempotency.record
                    where expires_at <= pg_catalog.statement_timestamp() - $4::interval
                        and expires_at >= coalesce($3::timestamptz, '-infinity')
                        and (lease_until is null or lease_until <= pg_catalog.statement_timestamp())
                        and ($2::oid is null or tableoid = $2::oid)
                    order by expires_at
                    limit $1::int8
                    for update skip locked
                ))
                and expires_at <= pg_catalog.statement_timestamp() - $4::interval
                and (lease_until is null or lease_until <= pg_catalog.statement_timestamp())
                and ($2::oid is null or tableoid = $2::oid)
            returning mode, completed_at, expires_at
        )
        select
            count(*) filter (where mode <> 'mark' and completed_at is not null) as completed,
            count(*) filter (where completed_at is null) as unfinished,
            count(*) filter (where mode = 'mark') as marks,
            -- An end that somebody has set to -infinity is more than a client can read.
            nullif(max(expires_at), '-infinity') as until
        from deleted
        ",
    )
    .persistent(false)
    .bind(i64::from(limit))
    .bind(leaf.map(Oid))
    .bind(since)
    .bind(interval(grace))
    .fetch_one(conn)
    .await
    .and_then(|row| Ok((Batch::of(&row)?, row.try_get("until")?)))
    .map_err(Error::of_statement)
}

/// [`sweep`] for a distributed table (Citus), which refuses `ctid` and `for update skip locked`: everything that is due up to
/// the end of the `limit`th record. Records of one and the same end are deleted together, so it may be some more; and it waits
/// for one that somebody has locked, who may prolong it: its new version is judged then, by the same predicate.
///
/// `since` and the second value are those of [`sweep`]. Records of one end are deleted together, so none of that end is left.
pub(crate) async fn sweep_distributed(
    conn: &mut PgConnection,
    limit: u32,
    since: Option<DateTime<Utc>>,
    grace: Duration,
) -> Result<(Batch, Option<DateTime<Utc>>), Error> {
    let deleted = sqlx::query(
        "
        delete from idempotency.record
        where expires_at <= pg_catalog.statement_timestamp() - $3::interval
            and expires_at >= coalesce($2::timestamptz, '-infinity')
            and (lease_until is null or lease_until <= pg_catalog.statement_timestamp())
            and expires_at <= (
                select max(due.expires_at)
                from (
                    select expires_at
                    from idempotency.record
                    where expires_at <= pg_catalog.statement_timestamp() - $3::interval
                        and expires_at >= coalesce($2::timestamptz, '-infinity')
                        and (lease_until is null or lease_until <= pg_catalog.statement_timestamp())
                    order by expires_at
                    limit $1::int8
                ) as due
            )
        returning
            mode = 'mark' as marks,
            mode <> 'mark' and completed_at is not null as completed,
            -- An end that somebody has set to -infinity is more than a client can read.
            nullif(expires_at, '-infinity') as expires_at
        ",
    )
    .persistent(false)
    .bind(i64::from(limit))
    .bind(since)
    .bind(interval(grace))
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    let mut batch = Batch::default();
    let mut until = None;
    for row in deleted {
        until = until.max(row.try_get("expires_at")?);
        match (row.try_get("marks")?, row.try_get("completed")?) {
            (true, _) => batch.marks += 1,
            (false, true) => batch.completed += 1,
            (false, false) => batch.unfinished += 1,
        }
    }
    Ok((batch, until))
}

/// The leaves of a partitioned table; a single `None` for one that is not.
///
/// A `tableoid` is a filter and prunes nothing, so the sweep of each leaf still probes the index of every leaf: with a few
/// dozen of them that is nothing, with thousands it is worth a janitor per leaf.
pub(crate) async fn leaves(conn: &mut PgConnection) -> Result<Vec<Option<u32>>, Error> {
    let leaves: Vec<Oid> = sqlx::query_scalar(
        "
        select tree.relid::oid
        from pg_catalog.pg_partition_tree('idempotency.record'::regclass) as tree
        where tree.isleaf and tree.parentrelid is not null
        order by tree.relid
        ",
    )
    .persistent(false)
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    if leaves.is_empty() {
        return Ok(vec![None]);
    }
    Ok(leaves.into_iter().map(|leaf| Some(leaf.0)).collect())
}

/// Counts what is due.
pub(crate) async fn count_due(conn: &mut PgConnection, grace: Duration) -> Result<Due, Error> {
    sqlx::query(
        "
        select
            count(*) filter (where mode <> 'mark' and completed_at is not null) as completed,
            count(*) filter (where completed_at is null) as unfinished,
            count(*) filter (where mode = 'mark') as marks
        from idempotency.record
        where expires_at <= pg_catalog.statement_timestamp() - $1::interval
            and (lease_until is null or lease_until <= pg_catalog.statement_timestamp())
        ",
    )
    .persistent(false)
    .bind(interval(grace))
    .fetch_one(conn)
    .await
    .and_then(|row| Batch::of(&row))
    .map_err(Error::of_statement)
}

/// For how long the oldest expired record has been due; `None` where none is.
pub(crate) async fn oldest_due(conn: &mut PgConnection, grace: Duration) -> Result<Option<Duration>, Error> {
    let seconds: Option<f64> = sqlx::query_scalar(
        "
        -- An end that somebody has set to -infinity is no number of seconds ago: its claim is.
        select extract(epoch from
            pg_catalog.statement_timestamp() - case when isfinite(expires_at) then expires_at else claimed_at end)::float8
        from idempotency.record
        where expires_at <= pg_catalog.statement_timestamp() - $1::interval
            and (lease_until is null or lease_until <= pg_catalog.statement_timestamp())
        order by expires_at
        limit 1
        ",
    )
    .persistent(false)
    .bind(interval(grace))
    .fetch_optional(conn)
    .await
    .map_err(Error::of_statement)?;
    Ok(seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()))
}
