//! The record of one key, and the parts that its statements share.

use std::time::Duration;

use sqlx::postgres::types::PgInterval;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgExecutor, Postgres, Row as _};

use crate::state::State;
use crate::{Deployment, Error, Key, Misuse, Mode};

/// The difference of two times has days of this length.
const MICROSECONDS_PER_DAY: i64 = 24 * 3600 * 1_000_000;

/// The record of one key.
#[derive(Clone, Copy)]
pub(crate) struct Record<'k> {
    pub(crate) key: &'k Key,
    pub(crate) deployment: Deployment,
}

impl<'k> Record<'k> {
    /// The record for an operator. An operator sends a statement once, so it is not worth preparing.
    pub(crate) fn unprepared(key: &'k Key) -> Self {
        Self { key, deployment: Deployment::new().prepared_statements(false) }
    }

    /// A statement on this record, whose parameters $1 to $3 are the key.
    pub(crate) fn query(self, sql: &'static str) -> Query<'k, Postgres, PgArguments> {
        sqlx::query(sql)
            .persistent(self.deployment.prepared)
            .bind(self.key.scope()) // $1
            .bind(self.key.operation()) // $2
            .bind(self.key.value()) // $3
    }
}

/// Sends a statement that changes one row or none, and returns whether it changed one.
pub(crate) async fn changes_a_row(
    executor: impl PgExecutor<'_>,
    statement: Query<'_, Postgres, PgArguments>,
) -> Result<bool, Error> {
    let done = statement.execute(executor).await.map_err(Error::of_statement)?;
    Ok(done.rows_affected() == 1)
}

/// The mode of a row that is only shown. A mode of a newer release is a decoding error here. Where the protocol reads a
/// row, it is [`Incompatible::UnknownMode`](crate::Incompatible::UnknownMode).
pub(super) fn known_mode(row: &PgRow) -> sqlx::Result<Mode> {
    let mode: &str = row.try_get("mode")?;
    Mode::from_column(mode)
        .map_err(|_| sqlx::Error::Decode(format!("unknown mode {mode:?} in idempotency.record").into()))
}

/// The key of a row that was found without it. A row whose key no caller can have was written by hand: it is left out
/// with a warning, because one such row must not hide the others.
pub(super) fn stored_key(row: &PgRow, operation: &str) -> sqlx::Result<Option<Key>> {
    let key = Key::recorded(row.try_get::<String, _>("scope")?, operation, row.try_get::<String, _>("value")?);
    if let Err(error) = &key {
        tracing::warn!(
            operation,
            error = error as &dyn std::error::Error,
            "a record whose key is not valid was left out"
        );
    }
    Ok(key.ok())
}

/// A row of a search. One that does not decode was written by hand, and is left out with a warning: see [`stored_key`].
pub(super) fn or_left_out<R>(operation: &str, row: sqlx::Result<Option<R>>) -> Option<R> {
    row.unwrap_or_else(|error| {
        tracing::warn!(
            operation,
            error = &error as &dyn std::error::Error,
            "a record that does not decode was left out"
        );
        None
    })
}

/// The pages of a search, each of the search's limit, until enough rows are left or there are no more. Rows that were
/// left out, however many, must not hide the others.
pub(super) struct Pages<R> {
    limit: i64,
    enough: usize,
    pub(super) skipped: i64,
    pub(super) found: Vec<R>,
}

impl<R> Pages<R> {
    pub(super) fn of(limit: i64, enough: usize, skipped: i64) -> Self {
        Self { limit, enough, skipped, found: Vec::new() }
    }

    /// Adds a page, and returns whether it is the last.
    pub(super) fn end_with(&mut self, page: Vec<Option<R>>) -> bool {
        let is_short = i64::try_from(page.len()).is_ok_and(|rows| rows < self.limit);
        self.found.extend(page.into_iter().flatten());
        self.skipped += self.limit;
        is_short || self.found.len() >= self.enough
    }
}

/// The state of a row that was read with [`state`](super::fragment::state).
pub(super) fn state(row: &PgRow) -> sqlx::Result<State> {
    let state: &str = row.try_get("state")?;
    State::from_column(state).ok_or_else(|| sqlx::Error::Decode(format!("unknown state {state:?}").into()))
}

/// The column `age` of a statement: `clock_timestamp() - now()`. If the server's clock has jumped back, the age is
/// unknown, and counts as the greatest.
pub(super) fn age(row: &PgRow) -> sqlx::Result<Duration> {
    let PgInterval { days, microseconds, .. } = row.try_get("age")?;
    let age = i64::from(days).saturating_mul(MICROSECONDS_PER_DAY).saturating_add(microseconds);
    Ok(Duration::from_micros(u64::try_from(age).unwrap_or(u64::MAX)))
}

/// A duration as a parameter. It has microseconds only: days and months would depend on the session's time zone.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    PgInterval { months: 0, days: 0, microseconds: microseconds(duration) }
}

/// A duration in PostgreSQL's unit. PostgreSQL itself refuses a time beyond its calendar.
pub(super) fn microseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// A random token from the operating system, so that a forked or restored process draws no token twice.
pub(crate) fn draw_token() -> Result<i64, Error> {
    match getrandom::u64() {
        Ok(random) => Ok(random.cast_signed()),
        Err(error) => Err(Error::Misuse(Misuse::NoRandomness { source: error.into() })),
    }
}
