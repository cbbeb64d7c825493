//! Deleting records that are past their retention, a batch at a time.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use super::fragment::{expired_at, readable, readable_place, table_or_leaf};
use super::statement::interval;
use crate::Error;

/// A retry could have continued the deleted record. As `may_be_retried`, of a record without a live lease: a
/// distributed table takes no clock in RETURNING.
macro_rules! could_be_retried {
    () => {
        concat!(
            "(completed_at is null and (lease_until = '-infinity' or mode in ('at_least_once', 'in_steps')) and ",
            $crate::record::fragment::no_step_in_doubt!(),
            ")"
        )
    };
}
pub(super) use could_be_retried;

/// The records that one batch deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deleted {
    pub(crate) completed: u64,
    pub(crate) unfinished: u64,
    pub(crate) indeterminate: u64,
    pub(crate) marks: u64,
    /// The latest `expires_at` among the deleted records. The next batch of the pass begins there. Otherwise it would
    /// walk over the index entries of all rows that the pass has deleted, because these entries stay until a vacuum
    /// removes them.
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

/// Deletes at most `limit` records that are past their retention by the `grace` and under no live lease, oldest first,
/// from the table or from one of its [`leaves`]. `since` is [`Deleted::until`] of the batch before.
///
/// It skips rows that another transaction has locked, to take them over for instance. The next pass deletes those rows.
/// By primary key in place of `ctid`, a batch would be five times slower.
///
/// It also deletes rows whose `expires_at` another transaction has moved to an earlier time meanwhile.
pub(super) async fn sweep(
    conn: &mut PgConnection,
    leaf: &str,
    limit: u32,
    since: Option<DateTime<Utc>>,
    grace: Duration,
) -> Result<Deleted, Error> {
    // Not a literal: a leaf has to be named, because no condition on the parent keeps the plan from reading all leaves.
    let sql = format!(
        concat! {
            "
        with /* pg_idempotency: sweep */ deleted as (
            delete from {leaf}
            -- An array, because `in (select … limit)` may run the select once for each outer row, and then delete more.
            where ctid = any (array(
                    select ctid
                    from {leaf}
                    where ", expired_at!("pg_catalog.statement_timestamp() - $3::interval"), "
                        and expires_at >= coalesce($2::timestamptz, '-infinity')
                    order by expires_at
                    limit $1::int8
                    for update skip locked
                ))
                -- The condition is repeated: it must be true for the row version that is deleted, not for the selected
                -- one.
                and ", expired_at!("pg_catalog.statement_timestamp() - $3::interval"), "
            returning mode, completed_at, expires_at, ", could_be_retried!(), " as retried
        )
        select
            count(*) filter (where mode <> 'mark' and completed_at is not null) as completed,
            count(*) filter (where retried) as unfinished,
            count(*) filter (where completed_at is null and retried is not true) as indeterminate,
            count(*) filter (where mode = 'mark') as marks, ", readable_place!("max(expires_at)"), " as until
        from deleted
        "
        },
        leaf = leaf
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(i64::from(limit)) // $1
        .bind(since) // $2
        .bind(interval(grace)) // $3
        .try_map(|row: PgRow| {
            let count = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
            Ok(Deleted {
                completed: count("completed")?,
                unfinished: count("unfinished")?,
                indeterminate: count("indeterminate")?,
                marks: count("marks")?,
                until: row.try_get("until")?,
            })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
}

/// The leaves of a partitioned table, or the table itself, as the server quotes their names.
pub(super) async fn leaves(conn: &mut PgConnection) -> Result<Vec<String>, Error> {
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
    .map_err(Error::of_statement)
}

/// How long ago the oldest expired record expired; `None` if none is due.
pub(crate) async fn oldest_due(conn: &mut PgConnection, grace: Duration) -> Result<Option<Duration>, Error> {
    let seconds: Option<f64> = sqlx::query_scalar(concat! {
        "
        select /* pg_idempotency: oldest due */ extract(epoch from
            pg_catalog.statement_timestamp()
            -- Somebody may have set -infinity by hand: count from the claim.
            - case when pg_catalog.isfinite(expires_at) then expires_at else ", readable!("claimed_at"), " end)::float8
        from idempotency.record
        where ", expired_at!("pg_catalog.statement_timestamp() - $1::interval"), "
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
