//! Records that a test writes, in any state.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use serde_json::json;
use sqlx::PgExecutor;

use super::statement::{Record, microseconds};
use crate::response::Response;
use crate::{DEFAULT_RETENTION, Error, Fingerprint, Mode};

/// The time since the claim, and since the completion if the record is completed. It is long enough that no call mistakes
/// the claim for one of its own transaction, and far shorter than the retention.
const AGE: Duration = Duration::from_secs(60);

/// How long ago an event happened that is over, such as the end of a lease.
const MOMENT: Duration = Duration::from_millis(1);

/// The state of a record's `lease_until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseState {
    None,
    Live(Duration),
    Lapsed,
    Released,
}

/// The state of a record that a test writes.
#[derive(Clone, Debug)]
pub(crate) struct Staged {
    pub(crate) mode: Mode,
    /// A mark has none.
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) attempt: u32,
    /// The retention has ended, however long it is.
    pub(crate) expired: bool,
    pub(crate) lease: LeaseState,
    pub(crate) completed: bool,
    pub(crate) response: Response,
    pub(crate) last_error: Option<String>,
    /// By name; without a result a step is in doubt.
    pub(crate) steps: BTreeMap<String, Option<String>>,
    /// The JSON of the request.
    pub(crate) request: Option<Vec<u8>>,
}

impl Staged {
    /// The rule of `migrations/strict.sql` that this record would break. [`Key`](crate::Key) and [`Fingerprint`] keep
    /// the rules about their lengths.
    pub(crate) fn broken_rule(&self) -> Option<&'static str> {
        let leased = self.mode.is_leased();
        let rules = [
            ("attempts_count_from_one", self.attempt >= 1),
            ("fingerprint_unless_mark", (self.mode == Mode::Mark) == self.fingerprint.is_none()),
            ("mark_is_complete", self.mode != Mode::Mark || self.completed),
            ("completed_has_no_lease", !self.completed || self.lease == LeaseState::None),
            (
                "deadline_only_for_leases",
                match self.lease {
                    LeaseState::None => true,
                    LeaseState::Live(_) | LeaseState::Lapsed => leased,
                    LeaseState::Released => self.mode != Mode::Mark,
                },
            ),
            ("unfinished_lease_has_a_deadline", !leased || self.completed || self.lease != LeaseState::None),
            ("steps_only_in_steps", self.steps.is_empty() || (self.mode == Mode::InSteps && !self.completed)),
            ("request_only_to_resume", self.request.is_none() || (self.mode.repeats() && !self.completed)),
        ];
        rules.into_iter().find_map(|(rule, kept)| (!kept).then_some(rule))
    }

    /// The column `steps`. Its times only inform people, so the test's clock is good enough.
    fn steps_as_json(&self) -> Option<String> {
        let at = DateTime::<Utc>::from(SystemTime::now().checked_sub(AGE).unwrap_or(SystemTime::UNIX_EPOCH));
        let at = at.to_rfc3339();
        let steps = self.steps.iter().map(|(name, result)| {
            let step = match result {
                Some(result) => json!({"result": result, "attempt": self.attempt, "at": at}),
                None => json!({"begun": at, "attempt": self.attempt}),
            };
            (name.clone(), step)
        });
        (!self.steps.is_empty()).then(|| serde_json::Value::Object(steps.collect()).to_string())
    }

    /// The rest of the lease in microseconds, negative once it has lapsed.
    fn lease_left(&self) -> Option<i64> {
        match self.lease {
            LeaseState::None | LeaseState::Released => None,
            LeaseState::Live(left) => Some(microseconds(left)),
            LeaseState::Lapsed => Some(-microseconds(MOMENT)),
        }
    }

    /// The rest of the retention in microseconds, negative once it has ended.
    fn retention_left(&self) -> i64 {
        if self.expired { -microseconds(MOMENT) } else { microseconds(DEFAULT_RETENTION - AGE) }
    }
}

impl Record<'_> {
    /// Writes the record, and replaces any other record of the key.
    pub(crate) async fn stage(self, executor: impl PgExecutor<'_>, staged: Staged) -> Result<(), Error> {
        self.query(
            "
            insert into idempotency.record (
                scope, operation, value, mode, fingerprint, token, attempt,
                claimed_at, completed_at, lease_until, expires_at,
                response_status, response_headers, response_body, last_error, steps, request
            )
            values (
                $1::text, $2::text, $3::text, $4::text, $5::bytea, 0, $6::int4,
                statement_timestamp() - $7::int8 * interval '1 microsecond',
                case when $8::bool then statement_timestamp() - $7::int8 * interval '1 microsecond' end,
                case when $9::bool then '-infinity'
                    else statement_timestamp() + $10::int8 * interval '1 microsecond'
                end,
                statement_timestamp() + $11::int8 * interval '1 microsecond',
                $12::int2, $13::text::jsonb, $14::bytea, $15::text, $16::text::jsonb, $17::bytea
            )
            on conflict (scope, operation, value) do update
            set mode = excluded.mode, fingerprint = excluded.fingerprint, token = excluded.token,
                attempt = excluded.attempt, claimed_at = excluded.claimed_at, completed_at = excluded.completed_at,
                lease_until = excluded.lease_until, expires_at = excluded.expires_at,
                response_status = excluded.response_status, response_headers = excluded.response_headers,
                response_body = excluded.response_body, last_error = excluded.last_error,
                steps = excluded.steps, request = excluded.request
            ",
        )
        .bind(staged.mode.as_str()) // $4
        .bind(staged.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
        .bind(i32::try_from(staged.attempt).unwrap_or(i32::MAX)) // $6
        .bind(microseconds(AGE)) // $7
        .bind(staged.completed) // $8
        .bind(staged.lease == LeaseState::Released) // $9
        .bind(staged.lease_left()) // $10
        .bind(staged.retention_left()) // $11
        .bind(staged.response.status) // $12
        .bind(&staged.response.headers) // $13
        .bind(&staged.response.body) // $14
        .bind(&staged.last_error) // $15
        .bind(staged.steps_as_json()) // $16
        .bind(&staged.request) // $17
        .execute(executor)
        .await
        .map(drop)
        .map_err(Error::of_statement)
    }
}
