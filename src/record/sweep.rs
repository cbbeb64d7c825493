//! Deleting records that are past their retention, a batch at a time.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::postgres::types::Oid;
use sqlx::{Executor as _, PgConnection, Row as _};

use super::fragment::{counts_by_kind, expired_at};
use super::statement::interval;
use crate::Error;

/// The records that one batch deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) completed: u64,
    pub(crate) unfinished: u64,
    pub(crate) marks: u64,
    /// The latest `expires_at` among the deleted records. The next batch of the pass begins there. Otherwise it would
    /// walk over the index entries of all rows that the pass has deleted, because these entries stay until a vacuum
    /// removes them.
    pub(crate) until: Option<DateTime<Utc>>,
}

impl Batch {
    pub(crate) fn rows(&self) -> u64 {
        self.completed + self.unfinished + self.marks
    }

    /// Reads the counts.
    pub(super) fn of(row: &PgRow) -> sqlx::Result<Self> {
        let count = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
        Ok(Self {
            completed: count("completed")?,
            unfinished: count("unfinished")?,
            marks: count("marks")?,
            until: None,
        })
    }
}

/// Deletes at most `limit` records that are past their retention by the `grace` and under no live lease, oldest first.
/// `since` is [`Batch::until`] of the batch before.
///
/// It skips rows that another transaction has locked, to take them over for instance. The next pass deletes those rows.
/// It also deletes rows whose `expires_at` another transaction has moved to an earlier time meanwhile. A `ctid` is
/// unique within a leaf only, so `leaf` names a leaf if the table is partitioned.
pub(crate) async fn sweep(
    conn: &mut PgConnection,
    leaf: Option<u32>,
    limit: u32,
    since: Option<DateTime<Utc>>,
    grace: Duration,
) -> Result<Batch, Error> {
    sqlx::query(concat! {
        "
        with deleted as (
            delete from idempotency.record
            -- An array, because `in (select … limit)` may run the select once for each outer row, and then delete more.
            where ctid = any (array(
                    select ctid
                    from idempotency.record
                    where ", expired_at!("pg_catalog.statement_timestamp() - $4::interval"), "
                        and expires_at >= coalesce($3::timestamptz, '-infinity')
                        and ($2::oid is null or tableoid = $2::oid)
                    order by expires_at
                    limit $1::int8
                    for update skip locked
                ))
                -- The condition is repeated: it must be true for the row version that is deleted, not for the selected
                -- one.
                and ", expired_at!("pg_catalog.statement_timestamp() - $4::interval"), "
                and ($2::oid is null or tableoid = $2::oid)
            returning mode, completed_at, expires_at
        )
        select
            ", counts_by_kind!(), ",
            -- A client cannot read -infinity, which somebody may have set by hand.
            nullif(max(expires_at), '-infinity') as until
        from deleted
        ",
    })
    .persistent(false)
    .bind(i64::from(limit))
    .bind(leaf.map(Oid))
    .bind(since)
    .bind(interval(grace))
    .try_map(|row| Ok(Batch { until: row.try_get("until")?, ..Batch::of(&row)? }))
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}

/// [`sweep`] for a distributed table (Citus), which refuses `ctid` and `for update skip locked`. It deletes everything
/// that is due up to the `expires_at` of the `limit`th record.
///
/// Records that share this `expires_at` are deleted together, so it may delete some more. It waits for a record that
/// another transaction has locked, for at most a second (SQLSTATE 55P03). The owner may have prolonged that record
/// meanwhile, so PostgreSQL then checks the same condition against the new version of the row.
pub(crate) async fn sweep_distributed(
    conn: &mut PgConnection,
    limit: u32,
    since: Option<DateTime<Utc>>,
    grace: Duration,
) -> Result<Batch, Error> {
    conn.execute("set local citus.propagate_set_commands = 'local'; set local lock_timeout = '1s'")
        .await
        .map_err(Error::of_statement)?;
    let deleted = sqlx::query(concat! {
        "
        delete from idempotency.record
        where ", expired_at!("pg_catalog.statement_timestamp() - $3::interval"), "
            and expires_at >= coalesce($2::timestamptz, '-infinity')
            and expires_at <= (
                select max(due.expires_at)
                from (
                    select expires_at
                    from idempotency.record
                    where ", expired_at!("pg_catalog.statement_timestamp() - $3::interval"), "
                        and expires_at >= coalesce($2::timestamptz, '-infinity')
                    order by expires_at
                    limit $1::int8
                ) as due
            )
        returning
            mode = 'mark' as marks,
            mode <> 'mark' and completed_at is not null as completed,
            -- A client cannot read -infinity, which somebody may have set by hand.
            nullif(expires_at, '-infinity') as expires_at
        ",
    })
    .persistent(false)
    .bind(i64::from(limit))
    .bind(since)
    .bind(interval(grace))
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    let mut batch = Batch::default();
    for row in deleted {
        batch.until = batch.until.max(row.try_get("expires_at")?);
        match (row.try_get("marks")?, row.try_get("completed")?) {
            (true, _) => batch.marks += 1,
            (false, true) => batch.completed += 1,
            (false, false) => batch.unfinished += 1,
        }
    }
    Ok(batch)
}

/// The leaves of a partitioned table, or a single `None` if the table is not partitioned.
///
/// A `tableoid` is a filter and prunes nothing, so the sweep of each leaf probes the index of every leaf. For a few
/// dozen leaves this costs nothing.
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
