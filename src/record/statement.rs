//! The record of one key, and the shared parts of the statements on it: parameters, functions that read rows, and
//! fragments of SQL.

use std::time::Duration;

use sqlx::postgres::types::PgInterval;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgExecutor, Postgres, Row as _};

use crate::state::State;
use crate::{Error, Key, Misuse, Mode};

/// The length of a day in an interval that PostgreSQL computes from two times.
const MICROSECONDS_PER_DAY: i64 = 24 * 3600 * 1_000_000;

/// The record of one key.
#[derive(Clone, Copy)]
pub(crate) struct Record<'k> {
    pub(crate) key: &'k Key,
    pub(crate) persistent: bool,
}

impl<'k> Record<'k> {
    /// Creates a record whose statements are not prepared, because an operator sends each statement only once.
    pub(crate) fn unprepared(key: &'k Key) -> Self {
        Self { key, persistent: false }
    }

    /// A statement on this record. The parameters $1 to $3 are the key.
    pub(crate) fn query(self, sql: &'static str) -> Query<'k, Postgres, PgArguments> {
        sqlx::query(sql)
            .persistent(self.persistent)
            .bind(self.key.scope()) // $1
            .bind(self.key.operation()) // $2
            .bind(self.key.value()) // $3
    }
}

/// Sends a statement that changes one row or no row. Returns whether a row was changed.
pub(crate) async fn changes_a_row(
    executor: impl PgExecutor<'_>,
    statement: Query<'_, Postgres, PgArguments>,
) -> Result<bool, Error> {
    let done = statement.execute(executor).await.map_err(Error::of_statement)?;
    Ok(done.rows_affected() == 1)
}

/// Returns the mode of a row that an operator or a reconciler reads. A mode of a newer release causes a decoding error
/// here, but [`Incompatible::UnknownMode`](crate::Incompatible::UnknownMode) in a call.
pub(super) fn known_mode(row: &PgRow) -> sqlx::Result<Mode> {
    let mode: &str = row.try_get("mode")?;
    Mode::from_column(mode)
        .map_err(|_| sqlx::Error::Decode(format!("unknown mode {mode:?} in idempotency.record").into()))
}

/// The key of a row that a search has found. `None` if no caller can have this key, because the row was written
/// manually. Such a row is left out with a warning, so that the search still finds the other rows.
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

/// Returns a row of a search. A row that does not decode was written manually, and is left out with a warning: see
/// [`stored_key`].
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

/// The pages of a search. Each page has `limit` rows. The search ends when `enough` rows were found, or when no more
/// rows exist. Rows that were left out do not count as found, so the search continues after them.
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

    /// Adds a page, and returns whether the page is the last one.
    pub(super) fn end_with(&mut self, page: Vec<Option<R>>) -> bool {
        let is_short = i64::try_from(page.len()).is_ok_and(|rows| rows < self.limit);
        self.found.extend(page.into_iter().flatten());
        self.skipped += self.limit;
        is_short || self.found.len() >= self.enough
    }
}

/// The state of a row that was read with [`state`].
pub(super) fn state_of(row: &PgRow) -> sqlx::Result<State> {
    let state: &str = row.try_get("state")?;
    State::from_column(state).ok_or_else(|| sqlx::Error::Decode(format!("unknown state {state:?}").into()))
}

/// Reads the column `age`, which is `clock_timestamp() - now()`. If the server's clock has jumped back, the age is
/// unknown, and the function returns the greatest duration.
pub(super) fn age(row: &PgRow) -> sqlx::Result<Duration> {
    let PgInterval { days, microseconds, .. } = row.try_get("age")?;
    let age = i64::from(days).saturating_mul(MICROSECONDS_PER_DAY).saturating_add(microseconds);
    Ok(Duration::from_micros(u64::try_from(age).unwrap_or(u64::MAX)))
}

/// A duration as a parameter. The interval has microseconds only, because days and months would depend on the session's
/// time zone.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    // PostgreSQL itself refuses a time beyond its calendar.
    let microseconds = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    PgInterval { months: 0, days: 0, microseconds }
}

/// A random token from the operating system. A forked or restored process does not draw the same token again.
pub(crate) fn draw_token() -> Result<i64, Error> {
    match getrandom::u64() {
        Ok(random) => Ok(random.cast_signed()),
        Err(error) => Err(Error::Misuse(Misuse::NoRandomness { source: error.into() })),
    }
}

// The SQL that several statements share. Each macro is a literal for `concat!`, so a statement remains a
// `&'static str`. (The macro calls have braces, `concat! { … }`. With parentheses, rustfmt would put each part on a
// line of its own.)

/// The condition that no owner works under a live lease. A live lease protects its record, even past `expires_at`.
macro_rules! no_live_lease {
    () => {
        "(lease_until is null or lease_until <= pg_catalog.statement_timestamp())"
    };
}

/// The condition that the record of one key has not expired. Every statement that names the whole key uses this
/// fragment.
///
/// No index matches `… is true`. If the planner could use the index on `expires_at`, it would prefer this index to the
/// primary key where the statistics know no live record. A session keeps such a plan until the next ANALYZE, and each
/// call would read all live records. For the same reason, the other conditions on `expires_at` or `request` beside the
/// key have this form. `not (…)` would not help, because the planner negates the operator.
macro_rules! not_expired {
    () => {
        "(expires_at > pg_catalog.statement_timestamp()) is true"
    };
}

/// A time that a client may read, or from which SQL may subtract another time. **Every statement that returns or
/// subtracts a time of the table uses this fragment**, except a look, whose times the client limits. A person who pins
/// a key sets `infinity`, which neither chrono nor a subtraction accepts. The largest finite times of PostgreSQL are
/// also too large for chrono. Null stays null.
macro_rules! readable {
    ($time:literal) => {
        concat!(
            "case when ",
            $time,
            " > '9999-12-31 00:00:00+00' then '9999-12-31 00:00:00+00'::timestamptz when ",
            $time,
            " < '0001-01-01 00:00:00+00' then '0001-01-01 00:00:00+00'::timestamptz else ",
            $time,
            " end"
        )
    };
}

/// A position in the order of `expires_at`, from which a later statement continues. The position is null for a time
/// that is not [`readable`], because many records may share this time, and the later statement must not skip them.
macro_rules! readable_position {
    ($time:literal) => {
        concat!(
            "case when ",
            $time,
            " between '0001-01-01 00:00:00+00' and '9999-12-31 00:00:00+00' then ",
            $time,
            " end"
        )
    };
}

/// A time as text, for a later statement that compares or writes the time. The time may be infinite. JSON's form of a
/// time depends only on the time zone, which is UTC here. So every session writes the same text.
macro_rules! stored_time {
    ($time:literal) => {
        concat!("pg_catalog.btrim(pg_catalog.to_jsonb(", $time, " at time zone 'UTC')::text, '\"')")
    };
}

/// A hash of the steps with their results.
macro_rules! steps_hash {
    () => {
        "pg_catalog.jsonb_hash_extended(steps, 0::int8)"
    };
}

/// The names of the steps that were begun and have no result. The outcome of these steps is unknown. The argument
/// `silent` is true, because `keyvalue` fails for a value that is not an object. A single row that was written manually
/// must not stop a search.
macro_rules! steps_in_doubt {
    () => {
        "pg_catalog.jsonb_path_query_array(steps, '$.keyvalue() ? (exists (@.value.begun)).key', '{}'::jsonb, true)"
    };
}

/// The condition that the stored probes are still valid: no call has claimed, revived or settled the operation since
/// the probes were stored. The condition compares texts, because a cast would fail for a row that was written manually.
macro_rules! probes_count {
    () => {
        concat! {
            "(probes ->> 'token'::text = token::text
                and probes ->> 'lease_until'::text = ", $crate::record::statement::stored_time!("lease_until"), "
                and pg_catalog.jsonb_path_query_array(probes, '$.of[*].step')
                    = coalesce(", $crate::record::statement::steps_in_doubt!(), ", '[]'::jsonb))"
        }
    };
}

/// The condition that no step is in doubt. A record without steps fulfils the condition, too.
macro_rules! no_step_in_doubt {
    () => {
        "pg_catalog.jsonb_path_exists(steps, '$.*.begun') is not true"
    };
}

/// The condition under which the next caller may take over the unfinished record, and make the next attempt. No step
/// may be in doubt. The claim must be released, or it must have lapsed in a mode for which `Mode::repeats` is true. For
/// every other record, the condition is null or false.
macro_rules! may_be_retried {
    () => {
        concat! {
            "(completed_at is null
                and (lease_until = '-infinity'
                    or (lease_until <= pg_catalog.statement_timestamp() and mode in ('at_least_once', 'in_steps')))
                and ", $crate::record::statement::no_step_in_doubt!(), ")"
        }
    };
}

/// The [`State`](crate::state::State) of a record now. All statements that return or compare a state share this text.
/// The first branch that matches counts, so the order matters. Every claim ignores an expired record, whether or not a
/// sweep has deleted it. The last branch also covers a lapsed lease in a mode of a newer release.
///
/// A look derives the same state in Rust ([`Found::at`](super::tried::Found::at)). In SQL, the server would prepare
/// this expression for every look.
macro_rules! state {
    () => {
        concat! {
            "case
                when (expires_at <= pg_catalog.statement_timestamp()
                        and ", $crate::record::statement::no_live_lease!(), ")
                    then 'expired'
                when completed_at is not null then case mode when 'mark' then 'mark' else 'completed' end
                when lease_until > pg_catalog.statement_timestamp() then 'in_flight'
                when ", $crate::record::statement::may_be_retried!(), "
                    then case lease_until when '-infinity' then 'released' else 'lapsed' end
                else 'indeterminate'
            end"
        }
    };
}

/// The condition that a row of `pg_class` is the table, or a leaf of a partitioned table. Only leaves have rows.
macro_rules! table_or_leaf {
    () => {
        "(class.oid = 'idempotency.record'::regclass::oid
            or class.oid in (
                select tree.relid::oid from pg_catalog.pg_partition_tree('idempotency.record'::regclass) as tree where tree.isleaf
            ))"
    };
}

pub(super) use {
    may_be_retried, no_live_lease, no_step_in_doubt, not_expired, probes_count, readable, readable_position, state,
    steps_hash, steps_in_doubt, stored_time, table_or_leaf,
};

#[cfg(test)]
#[path = "../../tests/unit/record/statement.rs"]
mod tests;
