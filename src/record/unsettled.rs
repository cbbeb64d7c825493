//! The records that an operator has to settle.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::fragment::{may_be_retried, readable, readable_place, settled_by_an_operator, state, steps_in_doubt};
use super::statement::{self, known_mode};
use super::step::in_doubt;
use crate::state::State;
use crate::{Error, Key, Mode};

/// A record that remains as it is until an operator settles it, or its retention ends.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unsettled {
    /// Its mode. `Transaction` means a mistake in the service: a caller committed after an error.
    pub mode: Mode,
    /// [`Indeterminate`](State::Indeterminate); or [`Lapsed`](State::Lapsed) or [`Released`](State::Released), with all
    /// of its attempts used up.
    pub state: State,
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
    /// Until this moment repeats are refused. **After it, a repeat is performed.** The end of the year 9999 if somebody
    /// has set it to `infinity`.
    pub expires_at: DateTime<Utc>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// The names of all steps in doubt, in the order of their bytes.
    pub steps: Vec<String>,
    /// The key under which the next service saw the operation, as in
    /// [`Shown::downstream_key`](crate::operator::Shown::downstream_key). Each step has
    /// [its own](Self::step_downstream_key).
    pub downstream_key: Option<String>,
    fingerprint: Option<Vec<u8>>,
}

/// One part of a search for unsettled records.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct UnsettledPart {
    /// The unsettled records of this part, the oldest claim first.
    pub found: Vec<Unsettled>,
    /// About how many records this part has read.
    pub read: u64,
    /// Where the next part begins; `None` at the end of the table.
    pub next: Option<DateTime<Utc>>,
}

/// The end of the retention of the `records`-th record after this moment, and how many records there are up to it.
/// `None` if this part is the last one. The
/// order is that of an index, and nearly that of the table's pages, because records of one retention expire in the
/// order of their claims.
pub(crate) async fn end_of_part(
    conn: &mut PgConnection,
    after: Option<DateTime<Utc>>,
    records: i64,
) -> Result<(Option<DateTime<Utc>>, u64), Error> {
    sqlx::query(concat! {
        "
        select ", readable_place!("max(expires_at)"), " as until, count(*) as read
        from (
            select expires_at
            from idempotency.record
            where expires_at > greatest($1::timestamptz, pg_catalog.statement_timestamp())
            order by expires_at
            limit $2::int8
        ) as part
        ",
    })
    .persistent(false)
    .bind(after) // $1
    .bind(records) // $2
    .try_map(|row: PgRow| Ok((row.try_get("until")?, row.try_get::<i64, _>("read")?.unsigned_abs())))
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}

/// The records that no caller will complete unless an operator settles them, oldest claim first: those that are
/// indeterminate, and those that have reached `max_attempts`. Without `max_attempts` no record has reached it, because
/// a comparison with null is never true. Only those that expire after the one moment, and not after the other.
///
/// Without these moments it reads the whole table: an index on the columns that completion changes would end its
/// heap-only updates.
pub(crate) async fn unsettled(
    conn: &mut PgConnection,
    limit: i64,
    max_attempts: Option<i32>,
    after: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
) -> Result<Vec<Unsettled>, Error> {
    sqlx::query(concat! {
        "
        select
            mode, scope, operation, value, fingerprint, token, attempt, last_error,
            ", readable!("claimed_at"), " as claimed_at, ", readable!("expires_at"), " as expires_at,
            ", steps_in_doubt!(), "::text as steps_in_doubt,
            ", state!(), " as state
        from idempotency.record
        where completed_at is null
            and expires_at > greatest($3::timestamptz, pg_catalog.statement_timestamp())
            and expires_at <= coalesce($4::timestamptz, 'infinity')
            -- A newer release's mode is for an operator with that release.
            and mode in ('transaction', 'at_least_once', 'in_steps', 'at_most_once')
            and (
                ", state!(), " = 'indeterminate'
                or (", may_be_retried!(), "
                    and mode <> 'transaction'
                    and attempt >= $2::int4
                    and not ", settled_by_an_operator!(), ")
            )
        order by record.claimed_at, scope, operation, value
        limit $1::int8
        ",
    })
    .persistent(false)
    .bind(limit) // $1
    .bind(max_attempts) // $2
    .bind(after) // $3
    .bind(until) // $4
    .try_map(|row: PgRow| Unsettled::of(&row))
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}

impl Unsettled {
    /// The [downstream key](crate::lease::Step::downstream_key) of a step with this name. `None` outside lease mode.
    #[must_use]
    pub fn step_downstream_key(&self, step: &str) -> Option<String> {
        let fingerprint = self.fingerprint.as_deref().filter(|_| self.mode.is_leased())?;
        Some(Key::new(&*self.scope, &*self.operation, &*self.value).ok()?.downstream(fingerprint, step))
    }

    fn of(row: &PgRow) -> sqlx::Result<Self> {
        let mode = known_mode(row)?;
        let mut unsettled = Self {
            mode,
            state: statement::state(row)?,
            scope: row.try_get("scope")?,
            operation: row.try_get("operation")?,
            value: row.try_get("value")?,
            token: row.try_get("token")?,
            attempt: row.try_get::<i32, _>("attempt")?.unsigned_abs(),
            claimed_at: row.try_get("claimed_at")?,
            expires_at: row.try_get("expires_at")?,
            last_error: row.try_get("last_error")?,
            steps: in_doubt(row)?,
            downstream_key: None,
            fingerprint: row.try_get("fingerprint")?,
        };
        unsettled.downstream_key = unsettled.step_downstream_key("");
        Ok(unsettled)
    }
}
