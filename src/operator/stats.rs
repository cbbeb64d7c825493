//! What is in the table: sizes, and counts by operation, state and age.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::session::in_any_transaction;
use crate::{Error, record};

/// A sample of this many records tells shares to about half a per cent, and is read in a moment.
const SAMPLE: f64 = 30_000.0;

/// Upper ends of the classes of age that [`Group::age`] counts in; the last class is open.
pub const AGES: [&str; 5] = ["< 1 min", "< 1 h", "< 1 day", "< 7 days", "older"];

/// What a record can be, as [`Group::state`] has it.
pub const STATES: [&str; 7] = ["completed", "mark", "in_flight", "released", "lapsed", "indeterminate", "expired"];

/// What is in the table.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Whether counts and ages were read off every record, or estimated from a sample.
    pub exact: bool,
    /// How many records there are.
    pub records: u64,
    /// The table's size, with its TOAST.
    pub table_bytes: u64,
    /// The size of its two indexes.
    pub index_bytes: u64,
    /// Rows that a vacuum has to clear away, as the server counts them.
    pub dead_rows: u64,
    /// For how long the oldest expired record has been due; exact. `None` where none is.
    pub oldest_expired: Option<Duration>,
    /// Counts by operation, state and age.
    pub groups: Vec<Group>,
}

/// The records of one operation in one state and of one age.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Group {
    /// The operation.
    pub operation: String,
    /// `completed`, `mark`, `in_flight`, `released`, `lapsed`, `indeterminate` or `expired`.
    pub state: String,
    /// Which class of [`AGES`], since the claim.
    pub age: usize,
    /// How many.
    pub records: u64,
    /// When the oldest of them was claimed.
    pub oldest: DateTime<Utc>,
}

/// Tells what is in the table: from a sample of some 30 000 records, or, `exact`, from all of them, which takes as long as
/// reading the table does.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
pub async fn stats(conn: &mut PgConnection, exact: bool) -> Result<Stats, Error> {
    in_any_transaction(conn, async |conn| read_stats(conn, exact).await).await
}

async fn read_stats(conn: &mut PgConnection, exact: bool) -> Result<Stats, Error> {
    let size = record::size(conn).await?;
    // A table that was never analyzed is small, or so young that a sample means nothing.
    let percent = if exact || size.records < SAMPLE { 100.0 } else { 100.0 * SAMPLE / size.records };
    let sampled = record::groups(conn, percent as f32).await?;
    let scale = 100.0 / percent;
    let groups: Vec<Group> = sampled
        .into_iter()
        .map(|group| Group {
            operation: group.operation,
            state: group.state,
            age: usize::try_from(group.age).unwrap_or_default(),
            records: (group.records as f64 * scale).round() as u64,
            oldest: group.oldest,
        })
        .collect();
    Ok(Stats {
        exact: percent >= 100.0,
        records: groups.iter().map(|group| group.records).sum(),
        table_bytes: size.table_bytes.unsigned_abs(),
        index_bytes: size.index_bytes.unsigned_abs(),
        dead_rows: size.dead_rows.unsigned_abs(),
        oldest_expired: record::oldest_due(conn, Duration::ZERO).await?,
        groups,
    })
}
