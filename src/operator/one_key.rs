//! What became of one key, and how to forget it.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::lease::derive_downstream_key;
use crate::record::Record;
use crate::session::in_any_transaction;
use crate::{Deployment, Error, Key, Mode};

/// One record, without its response.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shown {
    /// Its mode.
    pub mode: Mode,
    /// As in [`Group::state`](super::Group::state).
    pub state: String,
    /// The fencing token of its last claim: what [`lease::resolve`](crate::lease::resolve), [`lease::release`](crate::lease::release)
    /// and [`forget`] ask for.
    pub token: i64,
    /// How often it was claimed.
    pub attempt: u32,
    /// When it was last claimed.
    pub claimed_at: DateTime<Utc>,
    /// When it was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// How long it is remembered.
    pub expires_at: DateTime<Utc>,
    /// For how long it is remembered yet; zero past its retention.
    pub retention_left: Duration,
    /// What is left of a live lease.
    pub lease_left: Option<Duration>,
    /// How large its response is.
    pub response_bytes: Option<u64>,
    /// What the next service saw as the key of the operation, as [`lease::downstream_key`](crate::lease::downstream_key)
    /// derives it: to look up there what became of it. `None` but in lease mode.
    pub downstream_key: Option<String>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
}

/// Shows the record of a key, without its response. `None` where there is none.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
pub async fn show(conn: &mut PgConnection, key: &Key) -> Result<Option<Shown>, Error> {
    let record = Record { key, deployment: Deployment::new().with_prepared_statements(false) };
    let shown = in_any_transaction(conn, async |conn| record.show(conn).await).await?;
    Ok(shown.map(|shown| Shown {
        downstream_key: match (shown.mode, shown.fingerprint) {
            (Mode::AtLeastOnce | Mode::AtMostOnce, Some(fingerprint)) => Some(derive_downstream_key(key, &fingerprint)),
            _ => None,
        },
        mode: shown.mode,
        state: shown.state,
        token: shown.token,
        attempt: shown.attempt.unsigned_abs(),
        claimed_at: shown.claimed_at,
        completed_at: shown.completed_at,
        expires_at: shown.expires_at,
        // Negative past its end.
        retention_left: Duration::try_from_secs_f64(shown.seconds_left).unwrap_or_default(),
        lease_left: shown.lease_seconds_left.and_then(|left| Duration::try_from_secs_f64(left).ok()),
        response_bytes: shown.response_bytes.map(|bytes| u64::from(bytes.unsigned_abs())),
        last_error: shown.last_error,
    }))
}

/// Forgets a key before its time: **the next call with it is performed again**. `token` is the one that [`show`] gave, so
/// that what was looked at is what goes.
///
/// # Errors
///
/// [`Error::LeaseLost`] where the record is under a live lease, or another claim's by now, or gone; the database's.
///
/// # Cancellation
///
/// Safe at every point: done, or not.
pub async fn forget(conn: &mut PgConnection, key: &Key, token: i64) -> Result<(), Error> {
    let record = Record { key, deployment: Deployment::new().with_prepared_statements(false) };
    let forgotten = in_any_transaction(conn, async |conn| record.forget(conn, token).await).await?;
    if forgotten { Ok(()) } else { Err(Error::LeaseLost) }
}
