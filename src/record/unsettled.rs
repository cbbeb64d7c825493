//! The records that an operator has to settle.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::fragment::{state, step_in_doubt};
use super::statement::known_mode;
use crate::{Error, Mode};

/// A record that remains as it is until an operator settles it, or its retention ends.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unsettled {
    /// Its mode. `Transaction` means a mistake in the service: a caller committed after an error.
    pub mode: Mode,
    /// `indeterminate`; or `lapsed` or `released`, with all of its attempts used up.
    pub state: String,
    /// The key's scope.
    pub scope: String,
    /// The key's operation.
    pub operation: String,
    /// The key's value.
    pub value: String,
    /// The fencing token of its last claim, as in [`Shown::token`](crate::operator::Shown::token).
    pub token: i64,
    /// How many times it was claimed.
    pub attempt: u32,
    /// When it was last claimed.
    pub claimed_at: DateTime<Utc>,
    /// Until this moment repeats are refused. **After it, a repeat is performed.**
    pub expires_at: DateTime<Utc>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// The step that is in doubt.
    pub step: Option<String>,
}

/// The records that no caller will complete unless an operator settles them, oldest claim first: those that are
/// indeterminate, and those that have reached `max_attempts`. Without `max_attempts` no record has reached it, because
/// a comparison with null is never true.
///
/// It reads the whole table: an index on the columns that completion changes would end its heap-only updates.
pub(crate) async fn unsettled(
    conn: &mut PgConnection,
    limit: i64,
    max_attempts: Option<i32>,
) -> Result<Vec<Unsettled>, Error> {
    sqlx::query(concat! {
        "
        select
            mode, scope, operation, key, token, attempt, claimed_at, expires_at, last_error,
            ", step_in_doubt!(), " as step,
            ", state!(), " as state
        from idempotency.record
        where completed_at is null
            and expires_at > pg_catalog.statement_timestamp()
            and (
                lease_until is null
                or (mode = 'at_most_once' and lease_until > '-infinity' and lease_until <= pg_catalog.statement_timestamp())
                or (pg_catalog.jsonb_path_exists(steps, '$.*.begun') and lease_until <= pg_catalog.statement_timestamp())
                or (mode in ('at_least_once', 'in_steps', 'at_most_once')
                    and lease_until <= pg_catalog.statement_timestamp()
                    and attempt >= $2::int4)
            )
        order by claimed_at, scope, operation, key
        limit $1::int8
        ",
    })
    .persistent(false)
    .bind(limit)
    .bind(max_attempts)
    .try_map(|row: PgRow| {
        Ok(Unsettled {
            mode: known_mode(&row)?,
            state: row.try_get("state")?,
            scope: row.try_get("scope")?,
            operation: row.try_get("operation")?,
            value: row.try_get("key")?,
            token: row.try_get("token")?,
            attempt: row.try_get::<i32, _>("attempt")?.unsigned_abs(),
            claimed_at: row.try_get("claimed_at")?,
            expires_at: row.try_get("expires_at")?,
            last_error: row.try_get("last_error")?,
            step: row.try_get("step")?,
        })
    })
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}
