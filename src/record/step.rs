//! The steps of an operation, in the column `steps`. Each statement requires the claim's token and a record without a
//! response, as in `ends.rs`. Each update changes only one step, on the server, so parallel steps do not overwrite each
//! other.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::opening::is_own_transaction;
use super::statement::{Record, changes_a_row, interval};
use crate::Error;

/// The results of an operation's steps as JSON text, by the names of the steps. An at-most-once step without a result
/// is in doubt, and so is a step in this database whose code has ended its transaction.
pub(crate) type StoredSteps = BTreeMap<String, Option<String>>;

/// A step of a [`Shown`](crate::operator::Shown) operation, without its result.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShownStep {
    /// The name.
    pub name: String,
    /// Whether the outcome of the step is unknown, because the step was begun and has no result.
    pub in_doubt: bool,
    /// The attempt that stored the result of the step, or that began the step.
    pub attempt: u32,
    /// When the result was stored, or when the step was begun.
    pub at: Option<DateTime<Utc>>,
    /// The size of the result.
    pub result_bytes: Option<u64>,
    /// The key of the step for the next service, if the step calls a service: see
    /// [`Step::downstream_key`](crate::lease::Step::downstream_key). If the step is in doubt, use this key to look up
    /// at the service whether the step took effect. A [`step`](crate::lease::Lease::step) in this database is in doubt
    /// only if its code has ended its transaction. The tables of the service then show whether the step took effect.
    pub downstream_key: String,
}

impl ShownStep {
    /// Reads the steps from the text of the column `steps`. The earliest step comes first.
    pub(super) fn all(row: &PgRow, downstream_key: impl Fn(&str) -> String) -> sqlx::Result<Vec<Self>> {
        // If the column `steps` does not contain a JSON object, it was written manually. An operator sees such a record
        // without its steps, and can forget the record.
        let entries = entries(row).unwrap_or_default().into_iter();
        let mut steps: Vec<Self> = entries.map(|(name, step)| Self::of(downstream_key(&name), name, &step)).collect();
        steps.sort_by(|a, b| (a.at, &a.name).cmp(&(b.at, &b.name)));
        Ok(steps)
    }

    fn of(downstream_key: String, name: String, step: &Value) -> Self {
        let text = |member| step.get(member).and_then(Value::as_str);
        let at: Option<DateTime<Utc>> = text("at").or(text("begun")).and_then(|at| at.parse().ok());
        Self {
            name,
            in_doubt: step.get("begun").is_some(),
            attempt: step
                .get("attempt")
                .and_then(Value::as_u64)
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or_default(),
            at,
            result_bytes: text("result").map(|result| result.len() as u64),
            downstream_key,
        }
    }
}

fn entries(row: &PgRow) -> sqlx::Result<serde_json::Map<String, Value>> {
    let Some(steps) = row.try_get::<Option<&str>, _>("steps")? else { return Ok(serde_json::Map::new()) };
    serde_json::from_str(steps).map_err(|error| sqlx::Error::Decode(error.into()))
}

/// Reads the text of [`steps_in_doubt`](super::statement::steps_in_doubt), and sorts the names by their bytes.
pub(super) fn in_doubt(row: &PgRow) -> sqlx::Result<Vec<String>> {
    let Some(names) = row.try_get::<Option<&str>, _>("steps_in_doubt")? else { return Ok(Vec::new()) };
    let mut names: Vec<String> = serde_json::from_str(names).map_err(|error| sqlx::Error::Decode(error.into()))?;
    names.sort_unstable();
    Ok(names)
}

/// The names of the steps in doubt that no other service has seen, from the text of the column `steps`.
pub(super) fn in_database(row: &PgRow) -> Vec<String> {
    let entries = entries(row).unwrap_or_default().into_iter();
    entries.filter(|(_, step)| step.get("in_database").is_some()).map(|(name, _)| name).collect()
}

impl Record<'_> {
    /// Stores the result of a step. Returns `false` if the step already has a result, or if the claim is gone.
    ///
    /// For a step in the database, this statement is the last one of the step's transaction. If a call of the step was
    /// dropped during COMMIT, the next call of the step then finds the result, and does not commit twice. If the
    /// caller's code has ended the transaction, this function stores nothing and returns `false`, and
    /// [`is_open`](super::opening::is_open) also returns `false`.
    pub(crate) async fn finish_step(
        self,
        conn: &mut PgConnection,
        token: i64,
        attempt: i32,
        name: &str,
        result: &str,
    ) -> Result<bool, Error> {
        let update = self
            .query(concat! {
                "
                update /* pg_idempotency: finish step */ idempotency.record
                set steps = coalesce(steps, '{}') || pg_catalog.jsonb_build_object($5::text, pg_catalog.jsonb_build_object(
                    'result', $6::text, 'attempt', $7::int4, 'at', pg_catalog.statement_timestamp()
                ))
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and steps -> $5::text -> 'result'::text is null
                    and ", is_own_transaction!("step"), "
                ",
            })
            .bind(token) // $4
            .bind(name) // $5
            .bind(result) // $6
            .bind(attempt); // $7
        changes_a_row(conn, update).await
    }

    /// Stores that a step begins, and keeps the record for at least another `retention` from now. Returns `false` if
    /// the step was begun or finished before, if the lease has lapsed, or if the claim is gone.
    ///
    /// This update is not heap-only, because `expires_at` is indexed. So each at-most-once step adds an entry to each
    /// index of the table.
    pub(crate) async fn begin_step(
        self,
        conn: &mut PgConnection,
        token: i64,
        attempt: i32,
        name: &str,
        retention: Duration,
    ) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: begin step */ idempotency.record
                set steps = coalesce(steps, '{}') || pg_catalog.jsonb_build_object($5::text, pg_catalog.jsonb_build_object(
                        'begun', pg_catalog.statement_timestamp(), 'attempt', $6::int4
                    )),
                    -- A process that dies in the step sends nothing more, and then the step is in doubt.
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $7::interval)
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    -- A machine that slept must renew the lease first: a probe of this step would come too early.
                    and lease_until > pg_catalog.statement_timestamp()
                    and steps -> $5::text -> 'begun'::text is null
                    and steps -> $5::text -> 'result'::text is null
                ",
            )
            .bind(token) // $4
            .bind(name) // $5
            .bind(attempt) // $6
            .bind(interval(retention)); // $7
        changes_a_row(conn, update).await
    }

    /// Stores that a step in this database is in doubt, because its code has ended its transaction. Keeps the record
    /// for at least another `retention` from now. Returns `false` if the step has a result, or if the claim is gone.
    /// The lease may have lapsed, because no attempt may perform this step again.
    ///
    /// No other service has seen the step. The mark `in_database` tells this to a reconciler.
    pub(crate) async fn leave_step_in_doubt(
        self,
        conn: &mut PgConnection,
        token: i64,
        attempt: i32,
        name: &str,
        retention: Duration,
    ) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: leave step in doubt */ idempotency.record
                set steps = coalesce(steps, '{}') || pg_catalog.jsonb_build_object($5::text, pg_catalog.jsonb_build_object(
                        'begun', pg_catalog.statement_timestamp(), 'attempt', $6::int4, 'in_database', true
                    )),
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $7::interval)
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and steps -> $5::text -> 'result'::text is null
                ",
            )
            .bind(token) // $4
            .bind(name) // $5
            .bind(attempt) // $6
            .bind(interval(retention)); // $7
        changes_a_row(conn, update).await
    }

    /// Removes a step that was begun, because the step took no effect. A step with a result stays. Returns `false` if
    /// the claim is gone.
    pub(crate) async fn retract_step(self, conn: &mut PgConnection, token: i64, name: &str) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: retract step */ idempotency.record
                set steps = case when steps -> $5::text -> 'result'::text is null then nullif(steps - $5::text, '{}') else steps end
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                ",
            )
            .bind(token) // $4
            .bind(name); // $5
        changes_a_row(conn, update).await
    }

    /// The steps that are stored under this token. `None` if the claim is gone.
    pub(crate) async fn steps(self, conn: &mut PgConnection, token: i64) -> Result<Option<StoredSteps>, Error> {
        self.query(
            "
            select /* pg_idempotency: read steps */ steps::text as steps
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
                and token = $4::int8
                and completed_at is null
            ",
        )
        .bind(token) // $4
        .try_map(|row: PgRow| {
            let result = |step: &Value| step.get("result").and_then(Value::as_str).map(str::to_owned);
            Ok(entries(&row)?.into_iter().map(|(name, step)| (name, result(&step))).collect())
        })
        .fetch_optional(conn)
        .await
        .map_err(Error::of_statement)
    }
}
