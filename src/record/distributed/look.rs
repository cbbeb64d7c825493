//! Looking at the record on a distributed table: the columns from the worker, the time and the lock from the coordinator.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::coordinator::{Coordinator, ask, pass_on_lock_timeout};
use crate::record::fragment::{readable, steps_in_doubt};
use crate::record::look::{Found, Look, Standing};
use crate::record::statement::Record;
use crate::record::step::in_doubt;
use crate::response::Response;
use crate::state::State;
use crate::{Error, Mode};

/// As [`Record::look`].
pub(crate) async fn look(
    record: Record<'_>,
    conn: &mut PgConnection,
    asked: Option<DateTime<Utc>>,
    waited: Duration,
) -> Result<Look, Error> {
    let row = record
        .query(concat! {
            "
            select
                mode, fingerprint, token, attempt, granted_attempt, last_error, trace, ", readable!("claimed_at"), " as claimed_at,
                ", steps_in_doubt!(), "::text as steps_in_doubt,
                completed_at is not null as completed,
                lease_until is not distinct from '-infinity' as released,
                ", readable!("lease_until"), " as lease_until, ", readable!("expires_at"), " as expires_at,
                response_status, response_headers::text as response_headers, response_body
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
            ",
        })
        .fetch_optional(&mut *conn)
        .await
        .map_err(Error::of_statement)?;
    let coordinator = ask(record, conn, row.is_none()).await?;
    if row.is_none() && coordinator.has_lock_timeout {
        // The claim that follows waits in its insert for a transaction in doubt that has inserted the key.
        pass_on_lock_timeout(conn).await?;
    }
    // The smaller, because the clock may have jumped back: a record must not expire before its time.
    let called = coordinator.at - TimeDelta::from_std(waited).unwrap_or_default();
    let asked = asked.map_or(called, |first| first.min(called));
    let standing = match (row, coordinator.mine) {
        (Some(row), _) => Standing::Found(Found::at(&row, asked, &coordinator).map_err(Error::of_statement)?),
        (None, Some(true)) => Standing::Free,
        (None, _) => Standing::Held,
    };
    // The transaction began with the check, so nobody asks for its age.
    Ok(Look { asked, age: Duration::ZERO, standing })
}

impl Found {
    /// The record as of the coordinator's time. A worker would evaluate the SQL expression of the state by its own clock,
    /// so its lines are here again, with the same order.
    fn at(row: &PgRow, asked: DateTime<Utc>, coordinator: &Coordinator) -> sqlx::Result<Self> {
        let token: i64 = row.try_get("token")?;
        let expires_at: DateTime<Utc> = row.try_get("expires_at")?;
        let lease_until: Option<DateTime<Utc>> = row.try_get("lease_until")?;
        let lease_left =
            lease_until.and_then(|until| (until - coordinator.at).to_std().ok()).filter(|left| !left.is_zero());
        let mode = Mode::from_column(row.try_get("mode")?);
        let steps_in_doubt = in_doubt(row)?;
        let state = if expires_at <= asked && lease_left.is_none() {
            State::Expired
        } else if row.try_get("completed")? {
            if matches!(mode, Ok(Mode::Mark)) { State::Mark } else { State::Completed }
        } else if lease_left.is_some() {
            State::InFlight
        } else if !steps_in_doubt.is_empty() {
            State::Indeterminate
        } else if row.try_get("released")? {
            State::Released
        } else if lease_until.is_some() && mode.as_ref().is_ok_and(|mode| mode.repeats()) {
            State::Lapsed
        } else {
            State::Indeterminate
        };
        Ok(Self {
            mode,
            fingerprint: row.try_get("fingerprint")?,
            token,
            attempt: row.try_get("attempt")?,
            claimed_at: row.try_get("claimed_at")?,
            claimed_by_this_transaction: coordinator.has_claimed_with(token),
            state,
            lease_left,
            response: Response::of(row)?,
            trace: row.try_get("trace")?,
            last_error: row.try_get("last_error")?,
            steps_in_doubt,
            granted_attempt: row.try_get("granted_attempt")?,
        })
    }
}
