//! The records that a sweep would delete.

use std::time::Duration;

use sqlx::PgConnection;
use sqlx::postgres::PgRow;

use super::fragment::{counts_by_kind, expired_at, readable};
use super::statement::interval;
use super::sweep::Batch;
use crate::Error;

/// Counts the records that sweeps would delete now.
pub(crate) async fn count_due(conn: &mut PgConnection, grace: Duration) -> Result<Batch, Error> {
    sqlx::query(concat! {
        "
        select
            ", counts_by_kind!(), "
        from idempotency.record
        where ", expired_at!("pg_catalog.statement_timestamp() - $1::interval"), "
        ",
    })
    .persistent(false)
    .bind(interval(grace)) // $1
    .try_map(|row: PgRow| Batch::of(&row))
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}

/// How long ago the oldest expired record expired; `None` if none is due.
pub(crate) async fn oldest_due(conn: &mut PgConnection, grace: Duration) -> Result<Option<Duration>, Error> {
    let seconds: Option<f64> = sqlx::query_scalar(concat! {
        "
        select extract(epoch from
            pg_catalog.statement_timestamp()
            -- Somebody may have set -infinity by hand: count from the claim.
            - case when isfinite(expires_at) then expires_at else ", readable!("claimed_at"), " end)::float8
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
