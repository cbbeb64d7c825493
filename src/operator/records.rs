//! Single records: those that wait for a decision, and the record of one key.

use std::num::NonZeroU32;

use sqlx::PgConnection;

use crate::record::{self, Record, Shown, Unsettled};
use crate::session::in_any_transaction;
use crate::{Error, Key};

/// Lists at most `limit` records that an operator has to settle, the oldest claim first. These are the indeterminate
/// records. If `max_attempts` is given, the list also contains the records in lease mode with at least that many
/// attempts ([exhausted](Error::Exhausted)).
///
/// It reads the whole table. An index for this rare call would cost more, because every completion would have to update
/// it.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn unsettled(
    conn: &mut PgConnection,
    limit: u32,
    max_attempts: Option<NonZeroU32>,
) -> Result<Vec<Unsettled>, Error> {
    // No record has more attempts than its column can store.
    let max_attempts = max_attempts.map(|most| i32::try_from(most.get()).unwrap_or(i32::MAX));
    in_any_transaction(conn, async |conn| record::unsettled(conn, i64::from(limit), max_attempts).await).await
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
pub async fn show(conn: &mut PgConnection, key: &Key) -> Result<Option<Shown>, Error> {
    in_any_transaction(conn, async |conn| Record::unprepared(key).show(conn).await).await
}

/// Deletes the record of a key before the record expires: **the next call with the key performs again**. `token` is
/// [`Shown::token`], so this deletes exactly the record that [`show`] has shown.
///
/// # Errors
///
/// - [`Error::LeaseLost`]: the record is under a live lease, belongs to another claim by now, or is gone.
/// - [`Error::SchemaMissing`], [`Error::Database`].
///
/// # Cancellation
///
/// Safe at every point: the record is deleted, or it is not.
pub async fn forget(conn: &mut PgConnection, key: &Key, token: i64) -> Result<(), Error> {
    match in_any_transaction(conn, async |conn| Record::unprepared(key).forget(conn, token).await).await? {
        true => Ok(()),
        false => Err(Error::LeaseLost),
    }
}
