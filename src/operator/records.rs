//! The functions with which an operator reads the record of one key, the records that wait for a decision, and the
//! content of the table.

use std::num::NonZeroU32;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};

use crate::limits::RETENTION;
use crate::record::{self, Group, Opening, Record, Shown};
use crate::session::in_pooled_transaction;
use crate::{Error, Key, migrate};

/// Lists at most `limit` records that an operator has to settle, the oldest claim first:
///
/// - indeterminate records. In transaction mode, an indeterminate record comes from [a mistake of its
///   caller](Error::Indeterminate).
/// - records without a stored request whose last error begins with `refused: `. A resumer of a leased HTTP layer writes
///   such an error.
/// - with `max_attempts`, also the records that a service with this limit refuses as [exhausted](Error::Exhausted).
/// - with `abandoned_for`, also the lapsed and released operations in lease mode, if no caller has claimed them for
///   this time. `abandoned_for` counts from the claim or from the end of the lease, whichever is later. A time over ten
///   years counts as ten years. An abandoned operation may have taken effect, for example if its process died in a
///   `step_at_least_once`.
///
/// The call reads the whole table. An index for this rare call would cost more, because every completion would have to
/// update the index.
///
/// # Errors and cancellation
///
/// [`Error::SchemaMissing`], [`Incompatible::Schema`](crate::Incompatible::Schema) if the schema cannot be trusted, and
/// [`Error::Database`]. The call only reads.
pub async fn unsettled(
    pool: &PgPool,
    limit: u32,
    max_attempts: Option<NonZeroU32>,
    abandoned_for: Option<Duration>,
) -> Result<Vec<Shown>, Error> {
    // A limit above `i32::MAX` counts as `i32::MAX`, which is the greatest number that the column `attempt` can store.
    let most = max_attempts.map(|most| i32::try_from(most.get()).unwrap_or(i32::MAX));
    let abandoned_for = abandoned_for.map(|time| time.min(*RETENTION.end()));
    let listing = async |conn: &mut PgConnection| {
        migrate::trusted(conn).await?;
        record::unsettled(conn, limit, most, abandoned_for).await
    };
    in_pooled_transaction(pool, Opening::ALL_ROWS, listing).await
}

/// Shows the record of a key, without its response. `None` means that there is no record.
///
/// # Errors and cancellation
///
/// As [`unsettled`].
pub async fn show(pool: &PgPool, key: &Key) -> Result<Option<Shown>, Error> {
    in_pooled_transaction(pool, Opening::ALL_ROWS, async |conn| {
        migrate::trusted(conn).await?;
        Record::unprepared(key).show(conn).await
    })
    .await
}

/// Lists at most `limit` records whose value begins with `beginning`, in the order of the value, the scope and the
/// operation. If `scope` or `operation` is `None`, the search includes every scope or every operation. An empty
/// `beginning` matches every value.
///
/// A search by a beginning reads only the entries of the primary key whose values have this beginning. So a value alone
/// is enough to find a key quickly. A search by a scope or an operation alone may read the whole table. When the time `within` is over, the server ends the search, and
/// the call fails. A time under a millisecond counts as a millisecond, and a time over 24 days as about 24 days.
///
/// # Errors and cancellation
///
/// As [`unsettled`]. When the time `within` is over, [`Error::Database`] with SQLSTATE 57014 (query canceled).
pub async fn search(
    pool: &PgPool,
    scope: Option<&str>,
    operation: Option<&str>,
    beginning: &str,
    limit: u32,
    within: Duration,
) -> Result<Vec<Shown>, Error> {
    // The server refuses a text with a NUL character, and no key contains a NUL character.
    if [scope, operation, Some(beginning)].into_iter().flatten().any(|part| part.contains('\0')) {
        return Ok(Vec::new());
    }
    in_pooled_transaction(pool, Opening::ALL_ROWS, async |conn| {
        migrate::trusted(conn).await?;
        record::limit_time(conn, within).await?;
        record::search(conn, scope, operation, beginning, limit).await
    })
    .await
}

/// The size of the sample, in records. With this size, a share is accurate to about half a per cent, and the sample is
/// read in a moment.
const SAMPLE: f64 = 30_000.0;

/// The content of the table.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Whether every record was counted. The counts of a table of more than about 30,000 records are estimates from a
    /// sample.
    pub exact: bool,
    /// The number of records.
    pub records: u64,
    /// The size of the table in bytes, including its TOAST table.
    pub table_bytes: u64,
    /// The size of the table's indexes in bytes.
    pub index_bytes: u64,
    /// The number of rows that a vacuum has to remove, according to the server's statistics.
    pub dead_rows: u64,
    /// The time since the oldest expired record expired. The time is always exact. `None` if no record has to be swept.
    pub oldest_expired: Option<Duration>,
    /// Counts by mode, operation and state.
    pub groups: Vec<Group>,
}

/// Reads the content of the table. In a large table, the counts come from a sample of about 30,000 records.
///
/// # Errors and cancellation
///
/// As [`unsettled`].
pub async fn stats(pool: &PgPool) -> Result<Stats, Error> {
    in_pooled_transaction(pool, Opening::ALL_ROWS, async |conn| {
        migrate::trusted(conn).await?;
        let size = record::size(conn).await?;
        // A table that was never analyzed is small, or too young for a useful sample. In this case, all records of the
        // table are counted.
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
