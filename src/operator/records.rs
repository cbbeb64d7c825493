//! Single records: those that wait for a decision, and the record of one key.

use std::num::NonZeroU32;

use chrono::{DateTime, Utc};
use sqlx::PgPool;

use crate::record::{self, Record, Shown, StoredResponse, Unsettled, UnsettledPart};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, Key};

/// Lists at most `limit` records that an operator has to settle, the oldest claim first. These are the indeterminate
/// records. If `max_attempts` is given, the list also contains the records in lease mode with at least that many
/// attempts ([exhausted](Error::Exhausted)).
///
/// It reads the whole table. An index for this rare call would cost more, because every completion would have to update
/// it. [`unsettled_part`] reads a part of the table.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn unsettled(pool: &PgPool, limit: u32, max_attempts: Option<NonZeroU32>) -> Result<Vec<Unsettled>, Error> {
    in_pooled_transaction(pool, Opening::Plain, async |conn| {
        record::unsettled(conn, i64::from(limit), most(max_attempts), None, None).await
    })
    .await
}

/// Reads the next `records` records, in the order of `expires_at`, and returns those of them that an operator has to
/// settle, as [`unsettled`] does. The first part begins after `None`, and each other one after
/// [`UnsettledPart::next`]. Records that expire at the same moment belong to the same part.
///
/// The time of a part depends on `records`, and not on the size of the table. A search in parts holds no snapshot
/// between them, so it sees each record as of the time of its part.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn unsettled_part(
    pool: &PgPool,
    after: Option<DateTime<Utc>>,
    records: u32,
    max_attempts: Option<NonZeroU32>,
) -> Result<UnsettledPart, Error> {
    // Parts without a record would never come to an end.
    let records = records.max(1);
    in_pooled_transaction(pool, Opening::Plain, async |conn| {
        let (until, read) = record::end_of_part(conn, after, i64::from(records)).await?;
        let found = record::unsettled(conn, i64::MAX, most(max_attempts), after, until).await?;
        Ok(UnsettledPart { found, read, next: until.filter(|_| read == u64::from(records)) })
    })
    .await
}

/// No record has more attempts than its column can store.
fn most(max_attempts: Option<NonZeroU32>) -> Option<i32> {
    max_attempts.map(|most| i32::try_from(most.get()).unwrap_or(i32::MAX))
}

/// Shows the record of a key, without its response. `None` means that there is no record.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn show(pool: &PgPool, key: &Key) -> Result<Option<Shown>, Error> {
    in_pooled_transaction(pool, Opening::Plain, async |conn| Record::unprepared(key).show(conn).await).await
}

/// Reads the stored response of a key, with at most `most` bytes of its body. `token` is [`Shown::token`]. `None` means
/// that the record has changed since, or has no response.
///
/// A response may be large, and it is confidential, so [`show`] does not read it.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn response(pool: &PgPool, key: &Key, token: i64, most: u32) -> Result<Option<StoredResponse>, Error> {
    let most = i32::try_from(most).unwrap_or(i32::MAX);
    in_pooled_transaction(pool, Opening::Plain, async |conn| {
        Record::unprepared(key).stored_response(conn, token, most).await
    })
    .await
}

/// Deletes the record of a key before the record expires: **the next call with the key performs again**. This deletes
/// exactly the record that [`show`] has shown.
///
/// # Errors
///
/// - [`Error::Changed`]: the record is under a live lease, belongs to another claim by now, has been completed since,
///   or is gone.
/// - [`Error::SchemaMissing`], [`Error::Database`].
///
/// # Cancellation
///
/// Safe at every point: the record is deleted, or it is not.
pub async fn forget(pool: &PgPool, key: &Key, shown: &Shown) -> Result<(), Error> {
    match in_pooled_transaction(pool, Opening::Plain, async |conn| Record::unprepared(key).forget(conn, shown).await)
        .await?
    {
        true => Ok(()),
        false => Err(Error::Changed),
    }
}
