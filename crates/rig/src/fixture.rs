//! Records that an earlier call would have left, in any state. The rules of `strict.sql` refuse a state that no call
//! leaves behind.

use std::collections::BTreeMap;
use std::time::Duration;

use pg_idempotency::lease::Policy;
use pg_idempotency::{Body, Error, Fingerprint, Key, Mode};
use serde::Serialize;
use serde_json::json;
use sqlx::PgExecutor;
use sqlx::types::chrono::Utc;

/// The end of a lease, as of the moment at which the record is written.
#[derive(Clone, Copy, Debug)]
enum Deadline {
    None,
    In(Duration),
    Passed,
    Released,
}

/// A record that was claimed a minute ago, for the first time, and is remembered for 24 hours.
#[derive(Clone, Debug)]
pub struct Fixture {
    key: Key,
    mode: Mode,
    fingerprint: Option<Fingerprint>,
    attempt: i32,
    deadline: Deadline,
    completed: bool,
    expired: bool,
    response: Option<Vec<u8>>,
    last_error: Option<String>,
    /// The result of each step; a step without one is in doubt.
    steps: BTreeMap<String, Option<String>>,
    request: Option<Vec<u8>>,
    /// The number of a reconciler's probes without a trace.
    probes: Option<u32>,
}

impl Fixture {
    pub fn completed<B, T>(key: &Key, body: &B, response: &T) -> Result<Self, Error>
    where
        B: Body + ?Sized,
        T: Serialize + ?Sized,
    {
        let response = serde_json::to_vec(response).expect("a response with a JSON form");
        Ok(Self { completed: true, response: Some(response), ..Self::indeterminate(key, body)? })
    }

    /// Under a lease that is live for its whole length.
    pub fn leased<B: Body + ?Sized>(key: &Key, body: &B, policy: Policy) -> Result<Self, Error> {
        let (mode, lease) = match policy {
            Policy::AtLeastOnce { lease } => (Mode::AtLeastOnce, lease),
            Policy::InSteps { lease } => (Mode::InSteps, lease),
            Policy::AtMostOnce { lease } => (Mode::AtMostOnce, lease),
        };
        Ok(Self { mode, deadline: Deadline::In(lease), ..Self::indeterminate(key, body)? })
    }

    /// Under a lease whose owner died.
    pub fn lapsed<B: Body + ?Sized>(key: &Key, body: &B, policy: Policy) -> Result<Self, Error> {
        Ok(Self { deadline: Deadline::Passed, ..Self::leased(key, body, policy)? })
    }

    /// In transaction mode.
    pub fn released<B: Body + ?Sized>(key: &Key, body: &B) -> Result<Self, Error> {
        Ok(Self { deadline: Deadline::Released, ..Self::indeterminate(key, body)? })
    }

    /// Claimed and committed in transaction mode, and not completed.
    pub fn indeterminate<B: Body + ?Sized>(key: &Key, body: &B) -> Result<Self, Error> {
        Ok(Self {
            mode: Mode::Transaction,
            fingerprint: Some(body.fingerprint()?),
            completed: false,
            ..Self::marked(key)
        })
    }

    pub fn marked(key: &Key) -> Self {
        Self {
            key: key.clone(),
            mode: Mode::Mark,
            fingerprint: None,
            attempt: 1,
            deadline: Deadline::None,
            completed: true,
            expired: false,
            response: None,
            last_error: None,
            steps: BTreeMap::new(),
            request: None,
            probes: None,
        }
    }

    /// A live lease still protects the record.
    pub fn expired(self) -> Self {
        Self { expired: true, ..self }
    }

    pub fn with_attempt(self, attempt: i32) -> Self {
        Self { attempt, ..self }
    }

    pub fn with_last_error(self, reason: impl Into<String>) -> Self {
        Self { last_error: Some(reason.into()), ..self }
    }

    pub fn with_step<T: Serialize + ?Sized>(mut self, name: &str, result: &T) -> Self {
        self.steps.insert(name.to_owned(), Some(serde_json::to_string(result).expect("a result with a JSON form")));
        self
    }

    pub fn with_step_in_doubt(mut self, name: &str) -> Self {
        self.steps.insert(name.to_owned(), None);
        self
    }

    pub fn with_stored_request<B: Serialize + ?Sized>(self, body: &B) -> Self {
        Self { request: Some(serde_json::to_vec(body).expect("a body with a JSON form")), ..self }
    }

    /// A reconciler has made this many probes and has found no trace each time. The next probe is due. The record has
    /// no steps, or one step in doubt.
    pub fn with_probes(self, no_trace: u32) -> Self {
        Self { probes: Some(no_trace), ..self }
    }

    /// All but the end of the lease.
    fn probes_as_json(&self) -> Option<String> {
        let no_trace = self.probes?;
        let finding = (no_trace > 0).then_some("no_trace");
        let mut probes = json!({"probes": no_trace, "no_trace": no_trace, "finding": finding, "at": null, "next": 1});
        if let Some((name, _)) = self.steps.iter().find(|(_, result)| result.is_none()) {
            probes["step"] = json!(name);
        }
        Some(json!({"token": 0, "of": [probes]}).to_string())
    }

    fn steps_as_json(&self) -> Option<String> {
        let at = Utc::now().to_rfc3339();
        let steps = self.steps.iter().map(|(name, result)| {
            let step = match result {
                Some(result) => json!({"result": result, "attempt": self.attempt, "at": at}),
                None => json!({"begun": at, "attempt": self.attempt}),
            };
            (name.clone(), step)
        });
        (!self.steps.is_empty()).then(|| serde_json::Value::Object(steps.collect()).to_string())
    }

    /// Writes the record, and replaces any other record of the key.
    pub async fn write(self, executor: impl PgExecutor<'_>) -> Result<(), Error> {
        let lease_left = match self.deadline {
            Deadline::None => None,
            Deadline::In(left) => Some(left.as_secs_f64()),
            Deadline::Passed => Some(-0.001),
            Deadline::Released => Some(f64::NEG_INFINITY),
        };
        sqlx::query(
            "
            insert into idempotency.record (
                scope, operation, value, mode, fingerprint, token, attempt,
                claimed_at, completed_at, lease_until, expires_at,
                response_body, last_error, steps, request, probes
            )
            values (
                $1::text, $2::text, $3::text, $4::text, $5::bytea, 0, $6::int4,
                statement_timestamp() - interval '1 minute',
                case when $7::bool then statement_timestamp() - interval '1 minute' end,
                case when $8::float8 = '-infinity' then '-infinity'
                    else statement_timestamp() + $8::float8 * interval '1 second'
                end,
                statement_timestamp() + $9::text::interval,
                $10::bytea, $11::text, $12::text::jsonb, $13::bytea,
                $14::text::jsonb || jsonb_build_object(
                    'lease_until', (statement_timestamp() + $15::float8 * interval '1 second') at time zone 'UTC'
                )
            )
            on conflict (scope, operation, value) do update
            set mode = excluded.mode, fingerprint = excluded.fingerprint, token = excluded.token,
                attempt = excluded.attempt, claimed_at = excluded.claimed_at, completed_at = excluded.completed_at,
                lease_until = excluded.lease_until, expires_at = excluded.expires_at,
                response_status = null, response_headers = null, response_body = excluded.response_body,
                granted_attempt = null, last_error = excluded.last_error, steps = excluded.steps, request = excluded.request,
                probes = excluded.probes
            ",
        )
        .bind(self.key.scope()) // $1
        .bind(self.key.operation()) // $2
        .bind(self.key.value()) // $3
        .bind(self.mode.to_string()) // $4
        .bind(self.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
        .bind(self.attempt) // $6
        .bind(self.completed) // $7
        .bind(lease_left) // $8
        .bind(if self.expired { "-1 ms" } else { "23:59:00" }) // $9
        .bind(&self.response) // $10
        .bind(&self.last_error) // $11
        .bind(self.steps_as_json()) // $12
        .bind(&self.request) // $13
        .bind(self.probes_as_json()) // $14
        .bind(self.probes.and(lease_left)) // $15
        .execute(executor)
        .await?;
        Ok(())
    }
}
