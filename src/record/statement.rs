//! The record of one key, and what the statements on it share: parameters, rows that are read, and fragments of SQL.

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

/// The state of a row that was read with [`state`].
pub(super) fn state_of(row: &PgRow) -> sqlx::Result<State> {
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

// The SQL that several statements share. Each macro is a literal for `concat!`, so a statement remains a
// `&'static str`. (The macro calls have braces, `concat! { … }`. With parentheses rustfmt would put each part on a
// line of its own.)

/// No owner works under a lease any more. A live lease protects its record, even past `expires_at`.
macro_rules! no_live_lease {
    () => {
        "(lease_until is null or lease_until <= pg_catalog.statement_timestamp())"
    };
}

/// A time that a client may read, or subtract another time from. **Every statement that does either with a time of the
/// table reads it through this fragment.** A person who pins a key sets `infinity`, which neither chrono nor a
/// subtraction takes; chrono ends before the largest times of PostgreSQL, too. Null stays null.
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

/// A place in the order of `expires_at`, at which a later statement goes on. Null for a time that is not [`readable`]:
/// many records may share it, and the statement that goes on must not lose them.
macro_rules! readable_place {
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

/// Reads a time that a later statement compares or writes, also an infinite one. JSON's form of a time depends on no
/// setting but the time zone, which is UTC here. So every session writes the same text.
macro_rules! stored_time {
    ($time:literal) => {
        concat!("pg_catalog.btrim(pg_catalog.to_jsonb(", $time, " at time zone 'UTC')::text, '\"')")
    };
}

/// Stands for the steps with their results.
macro_rules! steps_hash {
    () => {
        "pg_catalog.jsonb_hash_extended(steps, 0::int8)"
    };
}

/// The names of the steps that were begun and have no result, so it is unknown whether they took effect. The path is
/// silent, because `keyvalue` fails for a value that is not an object, and one row that was written by hand must not
/// stop a search.
macro_rules! steps_in_doubt {
    () => {
        "pg_catalog.jsonb_path_query_array(steps, '$.keyvalue() ? (exists (@.value.begun)).key', '{}'::jsonb, true)"
    };
}

/// The probes count: no call has claimed, revived or settled anything since. The condition compares texts, because a
/// cast would fail for a row that was written by hand.
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

/// No step is in doubt. Without steps, too.
macro_rules! no_step_in_doubt {
    () => {
        "pg_catalog.jsonb_path_exists(steps, '$.*.begun') is not true"
    };
}

/// The next caller may take the unfinished record over, as its next attempt: the claim was released, or its lease has
/// lapsed and its mode repeats. Null or false otherwise.
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

/// The [`State`](crate::state::State) of a record now, in one text for every question about it. The first line that
/// matches counts, so the order has a meaning. Every claim ignores an expired record, whether or not a sweep has
/// deleted it. The last line is also for a lease of a newer release's mode. A look
/// derives the same state itself ([`Found::at`](super::tried::Found::at)): the server would prepare this for every look,
/// and on Citus a worker would judge by its own clock.
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

/// A row of `pg_class` that is the table, or a leaf of it where the table is partitioned. Only leaves have rows.
macro_rules! table_or_leaf {
    () => {
        "(class.oid = 'idempotency.record'::regclass::oid
            or class.oid in (
                select tree.relid::oid from pg_catalog.pg_partition_tree('idempotency.record'::regclass) as tree where tree.isleaf
            ))"
    };
}

pub(super) use {
    may_be_retried, no_live_lease, no_step_in_doubt, probes_count, readable, readable_place, state, steps_hash,
    steps_in_doubt, stored_time, table_or_leaf,
};

#[cfg(test)]
#[path = "../../tests/unit/record/statement.rs"]
mod tests;
