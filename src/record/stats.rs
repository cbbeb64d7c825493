//! Sizes of the table, and counts of its records.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::fragment::{readable, state, table_or_leaf};
use super::statement;
use crate::Error;
use crate::state::State;

/// The sizes and counts that the server keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// An estimate of the last analyze or vacuum.
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

/// The records of one mode and operation, in one state.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Group {
    /// The mode, which may be one of a newer release.
    pub mode: String,
    /// The operation.
    pub operation: String,
    /// The state.
    pub state: State,
    /// The number of records.
    pub records: u64,
    /// When the oldest of them was claimed.
    pub oldest: DateTime<Utc>,
}

/// The usual [`size`](super::distributed::size).
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

/// Counts by mode, operation and state. It reads `percent` of the table's pages, and scales the counts up to the whole
/// table.
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
            state: statement::state(&row)?,
            records: (records as f64 * (100.0 / percent)).round() as u64,
            oldest: row.try_get("oldest")?,
        })
    })
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}
