//! The content of the table: sizes, and counts by mode, operation and state.

use std::time::Duration;

use sqlx::PgPool;

use crate::record::{self, Group};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, migrate};

/// The size of the sample, in records: a share is accurate to about half a per cent, and reading it takes a moment.
const SAMPLE: f64 = 30_000.0;

/// The content of the table.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Whether every record was counted. The counts of a larger table are estimates from a sample.
    pub exact: bool,
    /// The number of records.
    pub records: u64,
    /// The size of the table in bytes, with its TOAST.
    pub table_bytes: u64,
    /// The size of its indexes in bytes.
    pub index_bytes: u64,
    /// The number of rows that a vacuum has to remove, by the server's statistics.
    pub dead_rows: u64,
    /// How long ago the oldest expired record expired. Always exact; `None` if no record is due.
    pub oldest_expired: Option<Duration>,
    /// Counts by mode, operation and state.
    pub groups: Vec<Group>,
}

/// Reads the content of the table. In a large table, the counts come from a sample of about 30,000 records.
///
/// # Errors and cancellation
///
/// As [`unsettled`](super::unsettled).
pub async fn stats(pool: &PgPool) -> Result<Stats, Error> {
    in_pooled_transaction(pool, Opening::AllRows, async |conn| {
        migrate::trusted(conn).await?;
        let size = record::size(conn).await?;
        // A table that was never analyzed is small, or so young that a sample means nothing.
        let percent = if size.records <= SAMPLE { 100.0 } else { 100.0 * SAMPLE / size.records };
        let groups = record::groups(conn, percent).await?;
        Ok(Stats {
            exact: percent >= 100.0,
            records: groups.iter().map(|group| group.records).sum(),
            table_bytes: size.table_bytes.unsigned_abs(),
            index_bytes: size.index_bytes.unsigned_abs(),
            dead_rows: size.dead_rows.unsigned_abs(),
            oldest_expired: record::oldest_due(conn, Duration::ZERO).await?,
            groups,
        })
    })
    .await
}
