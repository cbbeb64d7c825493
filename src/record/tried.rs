//! The types that the statements of a claim share: the terms, the time of the call, and the result of a statement.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::step::in_doubt;
use crate::outcome::StoredResponse;
use crate::state::{State, UnknownMode, Version};
use crate::{Error, Fingerprint, Misuse, Mode, OnDuplicate};

/// The terms of a claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) mode: Mode,
    /// `None` for a mark.
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) retention: Duration,
    pub(crate) on_duplicate: Option<OnDuplicate>,
    /// The length of the lease. `None` if the claim ends with its transaction.
    pub(crate) lease: Option<Duration>,
    pub(crate) max_attempts: Option<NonZeroU32>,
}

/// When a call was made. The time of the call decides whether a record has expired. If a record expires while the call
/// waits for a connection or for another request, the record still counts as not expired for this call.
pub(crate) struct CalledAt {
    /// The time of the call by the clock of this process. This clock shows how long the call has waited.
    since: Instant,
    /// The time of the call by the database's clock. `None` before the first look.
    pub(super) at: Option<DateTime<Utc>>,
    /// When the BEGIN was sent. `None` if the first statement need not check that this BEGIN began the transaction.
    unchecked_since: Option<Instant>,
}

impl CalledAt {
    pub(crate) fn since(since: Instant) -> Self {
        Self { since, at: None, unchecked_since: None }
    }

    pub(crate) fn in_transaction_since(self, unchecked_since: Option<Instant>) -> Self {
        Self { unchecked_since, ..self }
    }

    pub(crate) fn now() -> Self {
        Self::since(Instant::now())
    }

    pub(super) fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns when the call was made, by the database's clock. `now` is the time of that clock, and `waited` is how
    /// long the call had waited before it asked for the time. If the function is called more than once, the earliest of
    /// its results counts. Otherwise a record could expire before its time, because the clock may have jumped back.
    pub(super) fn seen_at(&mut self, now: DateTime<Utc>, waited: Duration) -> DateTime<Utc> {
        let called = now - TimeDelta::from_std(waited).unwrap_or_default();
        *self.at.insert(self.at.map_or(called, |first| first.min(called)))
    }

    /// Fails if the transaction is older than the BEGIN of the call, because a BEGIN inside a transaction begins
    /// nothing. The server's clock measures the age of the transaction. The clock of this process measures the age of
    /// the BEGIN. So the two clocks need not show the same time. The ages are compared only at the first statement,
    /// because the clocks drift apart during a long wait.
    pub(super) fn judge(&mut self, age: Duration) -> Result<(), Error> {
        match self.unchecked_since.take() {
            Some(since) if age > since.elapsed() => Err(Error::Misuse(Misuse::NotInTransaction)),
            _ => Ok(()),
        }
    }
}

/// The right to run `perform`. A claim lasts as long as its transaction, or as long as its lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) token: i64,
    pub(crate) attempt: i32,
}

/// The result of one statement of a call. The result decides whether the call next claims, looks, takes over or waits.
#[allow(clippy::large_enum_variant, reason = "moved once for each statement, which costs a round trip")]
pub(crate) enum Tried {
    Won(Claim),
    /// This record is in the way of the claim.
    Found(Found),
    /// The statement has not claimed the key, and the state of its record is not known. The call has to look.
    Unread,
    /// No record exists, and this transaction holds the key's lock. The call has to claim.
    Free,
    /// An open transaction holds the key, and its record is not committed. The call has to wait.
    Held,
    /// A sweep or an operator has locked the row, or has just deleted it. Their transactions do not hold the key's
    /// advisory lock.
    Locked,
}

/// A record that is in the way of a claim.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) mode: Result<Mode, UnknownMode>,
    pub(crate) fingerprint: Option<Vec<u8>>,
    pub(crate) token: i64,
    pub(crate) version: Version,
    pub(crate) attempt: i32,
    pub(crate) claimed_at: DateTime<Utc>,
    /// Whether this transaction has claimed the key in transaction mode, and has not completed the claim.
    pub(crate) is_open_claim_of_this_transaction: bool,
    /// The state of the record. The state is `Expired` if the retention had ended when the call was made, and if no
    /// live lease protects the record.
    pub(crate) state: State,
    /// The time that is left of a live lease.
    pub(crate) lease_left: Option<Duration>,
    pub(crate) response: StoredResponse,
    pub(crate) last_error: Option<String>,
    /// The names of the steps that were begun and have no result.
    pub(crate) steps_in_doubt: Vec<String>,
    /// The number of the attempt that an operator permits.
    pub(crate) granted_attempt: Option<i32>,
}

/// `-infinity` as PostgreSQL sends it.
const MINUS_INFINITY: i64 = i64::MIN;

/// Reads a time that PostgreSQL has sent as microseconds since the year 2000. The result is the one of the macro
/// [`readable`](super::statement::readable). In SQL, the server would prepare three of these expressions for every
/// look, which takes an eighth of its time.
fn readable(microseconds: i64) -> DateTime<Utc> {
    const YEAR_2000: i64 = 946_684_800_000_000;
    // 0001-01-01 and 9999-12-31
    let readable = microseconds.saturating_add(YEAR_2000).clamp(-62_135_596_800_000_000, 253_402_214_400_000_000);
    DateTime::from_timestamp_micros(readable).unwrap_or_default()
}

/// The columns that a look reads. [`Found::at`] derives the state from these columns.
macro_rules! columns {
    () => {
        concat!(
            "mode, fingerprint, token, attempt, granted_attempt, last_error, \
             completed_at is not null as completed, claimed_at, lease_until, expires_at, ",
            $crate::record::statement::steps_in_doubt!(),
            "::text as steps_in_doubt, ",
            $crate::record::statement::steps_hash!(),
            " as steps_hash, response_status, response_headers::text as response_headers, response_body"
        )
    };
}
pub(super) use columns;

/// The values that a look reads besides the record.
pub(super) struct Now {
    pub(super) at: DateTime<Utc>,
    /// The tokens of the claims of this transaction.
    pub(super) claims: Option<String>,
}

impl Now {
    fn has_claimed_with(&self, token: i64) -> bool {
        let token = token.to_string();
        self.claims.iter().flat_map(|claims| claims.split(' ')).any(|claim| claim == token)
    }
}

impl Found {
    /// Derives the state of a record by the conditions of [`state`](super::statement::state), in the same order.
    pub(super) fn at(row: &PgRow, asked: DateTime<Utc>, now: &Now) -> sqlx::Result<Self> {
        let token: i64 = row.try_get("token")?;
        let expires_at = readable(row.try_get_unchecked("expires_at")?);
        let stored_until: Option<i64> = row.try_get_unchecked("lease_until")?;
        let lease_until = stored_until.map(readable);
        let lease_left = lease_until.and_then(|until| (until - now.at).to_std().ok()).filter(|left| !left.is_zero());
        let mode = Mode::from_column(row.try_get("mode")?);
        let steps_in_doubt = in_doubt(row)?;
        let completed: bool = row.try_get("completed")?;
        let is_open_claim_of_this_transaction = matches!(mode, Ok(Mode::Transaction))
            && !completed
            && stored_until.is_none()
            && now.has_claimed_with(token);
        let state = if expires_at <= asked && lease_left.is_none() {
            State::Expired
        } else if completed {
            if matches!(mode, Ok(Mode::Mark)) { State::Mark } else { State::Completed }
        } else if lease_left.is_some() {
            State::InFlight
        } else if !steps_in_doubt.is_empty() {
            State::Indeterminate
        } else if stored_until == Some(MINUS_INFINITY) {
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
            version: Version { token, lease_until, steps_hash: row.try_get("steps_hash")?, completed },
            attempt: row.try_get("attempt")?,
            claimed_at: readable(row.try_get_unchecked("claimed_at")?),
            is_open_claim_of_this_transaction,
            state,
            lease_left,
            response: StoredResponse::of(row)?,
            last_error: row.try_get("last_error")?,
            steps_in_doubt,
            granted_attempt: row.try_get("granted_attempt")?,
        })
    }
}
