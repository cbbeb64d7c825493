//! One record as an operator sees it, its stored response, and its deletion by hand.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row as _};

use super::fragment::{no_live_lease, readable, state};
use super::statement::{self, Record, changes_a_row, known_mode};
use super::step::ShownStep;
use crate::state::State;
use crate::{Error, Key, Mode};

/// One record, without its response.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shown {
    /// Its mode.
    pub mode: Mode,
    /// Its state.
    pub state: State,
    /// The fencing token of its last claim, which [`resolve`](crate::operator::resolve()),
    /// [`release`](crate::operator::release()) and [`forget`](crate::operator::forget) require.
    pub token: i64,
    /// How many times it was claimed.
    pub attempt: u32,
    /// When it was last claimed.
    pub claimed_at: DateTime<Utc>,
    /// When it was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// When its retention ends. The end of the year 9999 if somebody has set it to `infinity`.
    pub expires_at: DateTime<Utc>,
    /// The rest of its retention; zero once that has ended.
    pub retention_left: Duration,
    /// The rest of a live lease.
    pub lease_left: Option<Duration>,
    /// The size of its response.
    pub response_bytes: Option<u64>,
    /// The key under which the next service saw the operation. [`lease::downstream_key`](crate::lease::downstream_key)
    /// derives the same key. With it, look up at that service whether the operation took effect. `None` outside lease
    /// mode. Each step of an operation in steps has [its own](Self::step_downstream_key).
    pub downstream_key: Option<String>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// The steps of an unfinished operation in steps, the earliest first, without their results.
    pub steps: Vec<ShownStep>,
    /// Whether the request is stored, so that a resumer may finish the operation.
    pub resumable: bool,
    key: Key,
    fingerprint: Option<Vec<u8>>,
}

impl Shown {
    /// The names of all steps in doubt, in the order of their bytes, for [`release`](crate::operator::release()).
    #[must_use]
    pub fn steps_in_doubt(&self) -> Vec<String> {
        let mut names: Vec<_> = self.steps.iter().filter(|step| step.in_doubt).map(|step| step.name.clone()).collect();
        names.sort_unstable();
        names
    }

    /// The [downstream key](crate::lease::Step::downstream_key) of a step with this name, also of a step that is not
    /// stored: one that was being performed when its process died, or one of a completed operation. `None` outside
    /// lease mode.
    #[must_use]
    pub fn step_downstream_key(&self, step: &str) -> Option<String> {
        let fingerprint = self.fingerprint.as_deref().filter(|_| self.mode.is_leased())?;
        Some(self.key.downstream(fingerprint, step))
    }
}

/// The stored response of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredResponse {
    /// HTTP only: the status.
    pub status: Option<u16>,
    /// HTTP only: names and values. A value has one character for each byte (ISO 8859-1).
    pub headers: Vec<(String, String)>,
    /// The first bytes of the body; outside HTTP it is JSON. `None` if the service chose not to store it.
    pub body: Option<Vec<u8>>,
    /// The size of the whole body.
    pub bytes: u64,
}

impl Record<'_> {
    /// Reads the record without its response, which may be large and is confidential.
    pub(crate) async fn show(self, conn: &mut PgConnection) -> Result<Option<Shown>, Error> {
        self.query(concat! {
            "
            select
                mode, fingerprint, token, attempt, last_error,
                ", readable!("claimed_at"), " as claimed_at, ", readable!("completed_at"), " as completed_at,
                ", readable!("expires_at"), " as expires_at,
                steps::text as steps, request is not null as resumable,
                pg_catalog.octet_length(response_body) as response_bytes,
                extract(epoch from (", readable!("expires_at"), ") - pg_catalog.statement_timestamp())::float8 as seconds_left,
                case when lease_until > pg_catalog.statement_timestamp()
                    then extract(epoch from (", readable!("lease_until"), ") - pg_catalog.statement_timestamp())::float8
                end as lease_seconds_left,
                ", state!(), " as state
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
            ",
        })
        .try_map(|row| {
            let mode = known_mode(&row)?;
            let fingerprint: Option<Vec<u8>> = row.try_get("fingerprint")?;
            let lease_seconds_left: Option<f64> = row.try_get("lease_seconds_left")?;
            let response_bytes: Option<i32> = row.try_get("response_bytes")?;
            Ok(Shown {
                mode,
                state: statement::state(&row)?,
                token: row.try_get("token")?,
                attempt: row.try_get::<i32, _>("attempt")?.unsigned_abs(),
                claimed_at: row.try_get("claimed_at")?,
                completed_at: row.try_get("completed_at")?,
                expires_at: row.try_get("expires_at")?,
                // Negative once the retention has ended.
                retention_left: Duration::try_from_secs_f64(row.try_get("seconds_left")?).unwrap_or_default(),
                lease_left: lease_seconds_left.and_then(|left| Duration::try_from_secs_f64(left).ok()),
                response_bytes: response_bytes.map(|bytes| u64::from(bytes.unsigned_abs())),
                downstream_key: fingerprint
                    .as_deref()
                    .filter(|_| mode.is_leased())
                    .map(|fingerprint| self.key.downstream(fingerprint, "")),
                last_error: row.try_get("last_error")?,
                steps: ShownStep::all(&row, |step| {
                    self.key.downstream(fingerprint.as_deref().unwrap_or_default(), step)
                })?,
                resumable: row.try_get("resumable")?,
                key: self.key.clone(),
                fingerprint,
            })
        })
        .fetch_optional(conn)
        .await
        .map_err(Error::of_statement)
    }

    /// Reads the response that is stored under this token, with at most `most` bytes of its body.
    pub(crate) async fn stored_response(
        self,
        conn: &mut PgConnection,
        token: i64,
        most: i32,
    ) -> Result<Option<StoredResponse>, Error> {
        self.query(
            "
            select
                response_status, response_headers::text as response_headers,
                substring(response_body from 1 for $5::int4) as body,
                coalesce(pg_catalog.octet_length(response_body), 0) as bytes
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
                and token = $4::int8
                and (response_body is not null or response_status is not null)
            ",
        )
        .bind(token) // $4
        .bind(most) // $5
        .try_map(|row| {
            let status: Option<i16> = row.try_get("response_status")?;
            let headers: Option<&str> = row.try_get("response_headers")?;
            let headers = headers.map(serde_json::from_str).transpose();
            Ok(StoredResponse {
                status: status.map(i16::unsigned_abs),
                headers: headers.map_err(|error| sqlx::Error::Decode(error.into()))?.unwrap_or_default(),
                body: row.try_get("body")?,
                bytes: u64::from(row.try_get::<i32, _>("bytes")?.unsigned_abs()),
            })
        })
        .fetch_optional(conn)
        .await
        .map_err(Error::of_statement)
    }

    /// Deletes the record that was shown, unless it is under a live lease. Returns whether it did. A completion keeps
    /// the token, and what is done is not to be forgotten for something unfinished.
    pub(crate) async fn forget(self, conn: &mut PgConnection, shown: &Shown) -> Result<bool, Error> {
        let delete = self
            .query(concat! {
                "
                delete from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is not distinct from $5::timestamptz
                    and ", no_live_lease!(), "
                ",
            })
            .bind(shown.token) // $4
            .bind(shown.completed_at); // $5
        changes_a_row(conn, delete).await
    }
}
