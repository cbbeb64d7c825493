//! Single records: those that wait for a decision, and the record of one key.

use std::num::NonZeroU32;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};

use crate::limits::RETENTION;
use crate::record::{self, Record, Shown};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, Key, migrate};

/// Lists at most `limit` records that an operator has to settle, the oldest claim first. These are the indeterminate
/// records, and those that have no stored request and whose last error begins with `refused: `, as a resumer of a
/// leased HTTP layer writes it. If `max_attempts` is given, the list also contains the records that a service with this
/// limit refuses as [exhausted](Error::Exhausted). If `abandoned_for` is given, it also contains the lapsed and
/// released operations in lease mode that nobody has claimed again for that time, counted from the claim and from the
/// end of the lease: one of them may have taken effect, for example a charge in an at-least-once step whose process
/// died, and its client does not know.
///
/// In transaction mode, such a record comes from [a mistake of its caller](Error::Indeterminate).
///
/// It reads the whole table. An index for this rare call would cost more, because every completion would have to update
/// it.
///
/// # Errors
///
/// [`Error::SchemaMissing`], [`Incompatible::Schema`](crate::Incompatible::Schema) if the schema cannot be trusted, and
/// [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
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
/// # Errors
///
/// As [`unsettled`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn show(pool: &PgPool, key: &Key) -> Result<Option<Shown>, Error> {
    in_pooled_transaction(pool, Opening::AllRows, async |conn| {
        migrate::trusted(conn).await?;
        Record::unprepared(key).show(conn).await
    })
    .await
}
