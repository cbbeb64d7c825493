//! The record of one key, and the records that wait for a decision.

use std::num::NonZeroU32;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};

use crate::limits::RETENTION;
use crate::record::{self, Record, Shown};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, Key, migrate};

/// Lists at most `limit` records that an operator has to settle, the oldest claim first:
///
/// - indeterminate records. In transaction mode, such a record comes from [a mistake of its
///   caller](Error::Indeterminate).
/// - records without a stored request whose last error begins with `refused: `. A resumer of a leased HTTP layer writes
///   it.
/// - with `max_attempts`, also the records that a service with this limit refuses as [exhausted](Error::Exhausted).
/// - with `abandoned_for`, also the lapsed and released operations under a lease that no caller has claimed for that
///   time, counted from the later one of the claim and the end of the lease. Such an operation may have taken effect,
///   for example if its process died in a `step_at_least_once`.
///
/// The call reads the whole table. An index for this rare call would cost more, because every completion would have to
/// update it.
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
    // No record has more attempts than its column can store.
    let most = max_attempts.map(|most| i32::try_from(most.get()).unwrap_or(i32::MAX));
    let abandoned_for = abandoned_for.map(|time| time.min(*RETENTION.end()));
    let listing = async |conn: &mut PgConnection| {
        migrate::trusted(conn).await?;
        record::unsettled(conn, limit, most, abandoned_for).await
    };
    in_pooled_transaction(pool, Opening::AllRows, listing).await
}

/// Shows the record of a key, without its response. `None` means that there is no record.
///
/// # Errors and cancellation
///
/// As [`unsettled`].
pub async fn show(pool: &PgPool, key: &Key) -> Result<Option<Shown>, Error> {
    in_pooled_transaction(pool, Opening::AllRows, async |conn| {
        migrate::trusted(conn).await?;
        Record::unprepared(key).show(conn).await
    })
    .await
}
