//! What waits for an operator.

use std::num::NonZeroU32;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::session::in_any_transaction;
use crate::{Error, Mode, record};

/// A record that stays as it is until an operator settles it, or its retention ends.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unsettled {
    /// Its mode. `Transaction` is a mistake in the service: a caller went on and committed after an error.
    pub mode: Mode,
    /// `indeterminate`; or `lapsed` or `released`, with all of its attempts used up.
    pub state: String,
    /// The key's scope.
    pub scope: String,
    /// The key's operation.
    pub operation: String,
    /// The key's value.
    pub value: String,
    /// The fencing token of its last claim, as in [`Shown::token`](super::Shown::token).
    pub token: i64,
    /// How often it was claimed.
    pub attempt: u32,
    /// When it was last claimed.
    pub claimed_at: DateTime<Utc>,
    /// Until when it is refused. **Past it, a repeat is performed.**
    pub expires_at: DateTime<Utc>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
}

/// Lists what an operator has to settle, the oldest claim first, `limit` of them at most: the indeterminate records, and,
/// given the `max_attempts` of the service, those in lease mode that are [exhausted](Error::Exhausted) by it.
///
/// It reads the whole table: an index for it would cost every completion more than this costs once in a while.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
pub async fn unsettled(
    conn: &mut PgConnection,
    limit: u32,
    max_attempts: Option<NonZeroU32>,
) -> Result<Vec<Unsettled>, Error> {
    // No record has more attempts than its column holds.
    let max_attempts = max_attempts.map(|most| i32::try_from(most.get()).unwrap_or(i32::MAX));
    let found =
        in_any_transaction(conn, async |conn| record::unsettled(conn, i64::from(limit), max_attempts).await).await?;
    Ok(found
        .into_iter()
        .map(|found| Unsettled {
            mode: found.mode,
            state: found.state,
            scope: found.scope,
            operation: found.operation,
            value: found.value,
            token: found.token,
            attempt: found.attempt.unsigned_abs(),
            claimed_at: found.claimed_at,
            expires_at: found.expires_at,
            last_error: found.last_error,
        })
        .collect())
}
