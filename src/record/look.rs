//! Looking at the record that is in the way of a claim, and waiting for the end of the transaction that has it.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::claim::Terms;
use super::statement::{self, Record};
use super::step::in_doubt;
use crate::fingerprint::Comparison;
use crate::mode::UnknownMode;
use crate::outcome::Response;
use crate::state::{State, Version};
use crate::{Deployment, Error, Mode, observe};

/// The result of a look.
pub(crate) struct Look {
    /// When the call was made, by the database's clock.
    pub(crate) asked: DateTime<Utc>,
    /// The age of the transaction, by the server's clock.
    pub(crate) age: Duration,
    pub(crate) standing: Standing,
}

/// The obstacle that a claim has met.
#[allow(clippy::large_enum_variant, reason = "moved once for each look, which costs a round trip")]
pub(crate) enum Standing {
    Found(Found),
    /// No record is there any more, and this transaction holds the lock: claim again.
    Free,
    /// An open transaction holds the key, and its record is not committed.
    Held,
}

/// A record that was in the way of a claim.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) mode: Result<Mode, UnknownMode>,
    pub(crate) fingerprint: Option<Vec<u8>>,
    pub(crate) token: i64,
    pub(crate) version: Version,
    pub(crate) attempt: i32,
    pub(crate) claimed_at: DateTime<Utc>,
    pub(crate) claimed_by_this_transaction: bool,
    /// Expired, if the retention had ended when the call was made, and no live lease protects the record.
    pub(crate) state: State,
    /// The rest of a live lease.
    pub(crate) lease_left: Option<Duration>,
    pub(crate) response: Response,
    /// The trace of its claim.
    pub(crate) trace: Option<String>,
    pub(crate) last_error: Option<String>,
    /// The names of the steps that were begun and have no result.
    pub(crate) steps_in_doubt: Vec<String>,
    /// The attempt that an operator permits.
    pub(crate) granted_attempt: Option<i32>,
}

/// What a look reads of the record. [`Found::at`] derives the state.
macro_rules! columns {
    () => {
        concat!(
            "mode, fingerprint, token, attempt, granted_attempt, last_error, trace, ",
            $crate::record::fragment::readable!("claimed_at"),
            " as claimed_at, ",
            $crate::record::fragment::steps_in_doubt!(),
            "::text as steps_in_doubt, ",
            $crate::record::fragment::steps_hash!(),
            " as steps_hash, completed_at is not null as completed, \
             lease_until is not distinct from '-infinity' as released, ",
            $crate::record::fragment::readable!("lease_until"),
            " as lease_until, ",
            $crate::record::fragment::readable!("expires_at"),
            " as expires_at, response_status, response_headers::text as response_headers, response_body"
        )
    };
}
pub(super) use columns;

impl Record<'_> {
    /// The usual [`look`](Record::look), in one statement.
    pub(super) async fn look_and_lock(
        self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
        waited: Duration,
    ) -> Result<Look, Error> {
        let row = self
            .query(concat! {
                "
                select /* pg_idempotency: look */
                    pg_catalog.statement_timestamp() as at,
                    pg_catalog.clock_timestamp() - pg_catalog.now() as age,
                    pg_catalog.current_setting('idempotency.claim', true) as claims,
                    case when record.token is null then pg_catalog.pg_try_advisory_xact_lock($4::int8) end as mine,
                    ", columns!(), "
                from (select) as one
                left join idempotency.record on scope = $1::text and operation = $2::text and value = $3::text
                ",
            })
            .bind(self.key.lock_id()) // $4
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        Look::of(&row, asked, waited).map_err(Error::of_statement)
    }
}

impl Look {
    fn of(row: &PgRow, asked: Option<DateTime<Utc>>, waited: Duration) -> sqlx::Result<Self> {
        let now = Now { at: row.try_get("at")?, claims: row.try_get("claims")? };
        let asked = now.when_asked(asked, waited);
        let standing = match row.try_get("mine")? {
            None => Standing::Found(Found::at(row, asked, &now)?),
            Some(true) => Standing::Free,
            Some(false) => Standing::Held,
        };
        Ok(Self { asked, age: statement::age(row)?, standing })
    }
}

/// What the server says beside the record: of a distributed table, the coordinator.
pub(super) struct Now {
    pub(super) at: DateTime<Utc>,
    /// The tokens that this transaction has claimed with.
    pub(super) claims: Option<String>,
}

impl Now {
    /// When the call was made. The smaller of two times, because the clock may have jumped back: a record must not
    /// expire before its time.
    pub(super) fn when_asked(&self, asked: Option<DateTime<Utc>>, waited: Duration) -> DateTime<Utc> {
        let called = self.at - TimeDelta::from_std(waited).unwrap_or_default();
        asked.map_or(called, |first| first.min(called))
    }

    fn has_claimed_with(&self, token: i64) -> bool {
        let token = token.to_string();
        self.claims.iter().flat_map(|claims| claims.split(' ')).any(|claim| claim == token)
    }
}

impl Found {
    /// Repeats the conditions of [`state`](super::fragment::state), in the same order. In SQL, the server would prepare
    /// the expression for every look, and of a distributed table a worker would evaluate it by its own clock.
    pub(super) fn at(row: &PgRow, asked: DateTime<Utc>, now: &Now) -> sqlx::Result<Self> {
        let token: i64 = row.try_get("token")?;
        let expires_at: DateTime<Utc> = row.try_get("expires_at")?;
        let lease_until: Option<DateTime<Utc>> = row.try_get("lease_until")?;
        let lease_left = lease_until.and_then(|until| (until - now.at).to_std().ok()).filter(|left| !left.is_zero());
        let mode = Mode::from_column(row.try_get("mode")?);
        let steps_in_doubt = in_doubt(row)?;
        let completed = row.try_get("completed")?;
        let state = if expires_at <= asked && lease_left.is_none() {
            State::Expired
        } else if completed {
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
            version: Version::of(row, completed)?,
            attempt: row.try_get("attempt")?,
            claimed_at: row.try_get("claimed_at")?,
            claimed_by_this_transaction: now.has_claimed_with(token),
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

impl Record<'_> {
    /// The option *select first*: a replay in one round trip, before any transaction begins. Returns `None` if it finds
    /// anything else, or if the statement fails: the claim that follows meets the same state, and returns the answer or
    /// the error. Also returns `None` if the connection is in an open transaction that has written something, because
    /// the record that it sees may not be committed.
    ///
    /// Without prepared statements this does nothing. sqlx would send the statement in two messages. Between the two, a
    /// pooler in transaction mode may change the server connection, and on the other connection the nameless statement
    /// is another client's.
    pub(crate) async fn select_first(self, conn: &mut PgConnection, terms: &Terms) -> Option<Response> {
        if !self.deployment.prepared || !self.deployment.saves_round_trips() {
            return None;
        }
        let row = self
            .query(
                "
                select /* pg_idempotency: select first */
                    fingerprint, response_status, response_headers::text as response_headers, response_body, trace
                from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                    and mode = $4::text
                    and completed_at is not null
                    and expires_at > pg_catalog.statement_timestamp()
                    and pg_catalog.pg_current_xact_id_if_assigned() is null
                    and idempotency.is_plain()
                ",
            )
            .bind(terms.mode.as_str()) // $4
            .fetch_optional(conn)
            .await
            .ok()??;
        if terms.fingerprint?.compare(row.try_get("fingerprint").ok()?) != Comparison::Same {
            return None;
        }
        observe::replaying(row.try_get("trace").ok()?);
        Response::of(&row).ok()
    }
}

/// How a [wait](Record::await_key) ended. The transaction is usable in every case.
pub(crate) enum Awaited {
    /// No record is there, and this transaction holds the lock: claim.
    Claim,
    /// A record is there.
    Look,
    TimedOut,
}

impl Record<'_> {
    /// Waits for the open transaction that holds the key, for at most `limit`, or for the caller's own `lock_timeout`
    /// if that is shorter. After an owner has rolled back, exactly one of the waiting calls is told to claim: when all
    /// of them tried, 100 waiting calls and 20 rollbacks took 1300 claims in place of 121. It is a function, because a
    /// savepoint that the crate sent would remain if the wait were cancelled. The transaction does not keep the lock of
    /// an unfinished record in another mode, which it must not take over: only calls in transaction mode and marks wait
    /// here, and neither may follow another mode.
    pub(crate) async fn await_key(
        self,
        conn: &mut PgConnection,
        limit: Duration,
        asked: Option<DateTime<Utc>>,
        mode: Mode,
    ) -> Result<Awaited, Error> {
        self.query(
            "
            select /* pg_idempotency: await */
                idempotency.await_key($1::text, $2::text, $3::text, $4::int8, $5::int8, $6::timestamptz, $7::text)
            ",
        )
        .bind(self.key.lock_id()) // $4
        .bind(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX).max(1)) // $5
        .bind(asked) // $6
        .bind(mode.as_str()) // $7
        .try_map(|row| {
            Ok(match row.try_get(0)? {
                "claim" => Awaited::Claim,
                "look" => Awaited::Look,
                _ => Awaited::TimedOut,
            })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
    }
}

/// Waits 10 ms for a row that another transaction has locked without the key's advisory lock. No lock shows when such a
/// transaction ends, but all of them are short. The server sleeps, because this crate does not choose the runtime.
pub(crate) async fn wait_for_row(conn: &mut PgConnection, deployment: Deployment) -> Result<(), Error> {
    let pause =
        sqlx::query("select /* pg_idempotency: pause */ pg_catalog.pg_sleep(0.01)").persistent(deployment.prepared);
    pause.execute(conn).await.map(drop).map_err(Error::of_statement)
}
