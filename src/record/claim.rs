//! Winning the right to perform: by inserting the record, or by taking over one that is expired, released or lapsed. A mark
//! is a claim that is complete at once.
//!
//! # The bounded wait
//!
//! Both statements wait for a concurrent owner, on the primary key or the row, with a `lock_timeout` for themselves only.
//! The claim keeps the caller's own setting in `idempotency.lock_timeout`, which lasts as long as the transaction; RETURNING
//! puts it back, or the [`look`](super::Record::look) that follows whenever nothing was returned. A shorter one of the
//! caller's stays in force. Where the order of evaluation matters, a nested `case` is the manual's means to fix it; a null
//! out of it fails the NOT NULL of `token`.
//!
//! # The advisory lock
//!
//! It decides nothing, the primary key does: it only lets a claim that must not wait see an owner whose row is not
//! committed yet. It is *tried*, never awaited: transactions that replayed hold it too, and waiting for it would make the
//! replays of one key strictly serial. It is tried once more in RETURNING, for the winner who had to wait for another
//! owner's transaction, and so for his lock; and, where that came a moment too early, in a statement of its own: PostgreSQL
//! wakes the waiter before it releases the advisory locks of the transaction that has ended.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::{Record, interval};
use crate::answer::RETRY_AFTER;
use crate::error::sqlstate;
use crate::{Error, Fingerprint, InFlight, Mode};

/// How long a claim may wait where it must not wait: for the rare owner who won without the lock because a replay's
/// transaction held it, and for a sweep that is deleting the row; then the transaction is aborted. Not PostgreSQL's shortest,
/// a millisecond: `lock_timeout` also covers the server's own lock for extending the table, which ordinary claims of other
/// keys hold for some milliseconds.
pub(super) const REJECT_WAIT: Duration = Duration::from_millis(100);

/// The right to perform: for as long as the claiming transaction lasts, or the lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) token: i64,
    pub(crate) attempt: i32,
}

/// What a claim is made for, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) mode: Mode,
    /// A mark has none.
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) retention: Duration,
    pub(crate) in_flight: InFlight,
    /// Until when the claim lasts, where that is not the transaction's end.
    pub(crate) lease: Option<Duration>,
    pub(crate) max_attempts: Option<NonZeroU32>,
}

impl Record<'_> {
    /// Claims the key by inserting its record; `None` where one is in the way.
    pub(crate) async fn claim(self, conn: &mut PgConnection, terms: &Terms) -> Result<Option<Claim>, Error> {
        let (sql, limit) = match terms.in_flight {
            InFlight::Wait(limit) => (
                "
                insert into idempotency.record
                    (mode, scope, operation, key, fingerprint, token, expires_at, lease_until, completed_at)
                values (
                    $9::text, $1::text, $2::text, $3::text, $4::bytea,
                    case when set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true) is not null
                    then
                        case when set_config(
                            'lock_timeout',
                            case when current_setting('lock_timeout')::interval between '1 ms' and $8::text::interval
                                then current_setting('lock_timeout')
                                else $8::text
                            end,
                            true
                        ) is not null
                        then
                            case when pg_try_advisory_xact_lock($7::int8) is not null then $5::int8 end
                        end
                    end,
                    statement_timestamp() + $6::interval,
                    statement_timestamp() + $10::interval,
                    case when $9::text = 'mark' then statement_timestamp() end
                )
                on conflict (scope, operation, key) do nothing
                returning
                    set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true),
                    pg_try_advisory_xact_lock($7::int8) as locked
                ",
                limit,
            ),
            InFlight::Reject => (
                "
                insert into idempotency.record
                    (mode, scope, operation, key, fingerprint, token, expires_at, lease_until, completed_at)
                select
                    $9::text, $1::text, $2::text, $3::text, $4::bytea, $5::int8,
                    statement_timestamp() + $6::interval,
                    statement_timestamp() + $10::interval,
                    case when $9::text = 'mark' then statement_timestamp() end
                where
                    case when set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true) is not null
                    then
                        case when set_config('lock_timeout', $8::text, true) is not null
                        then pg_try_advisory_xact_lock($7::int8)
                        end
                    end
                on conflict (scope, operation, key) do nothing
                returning
                    set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true),
                    true as locked
                ",
                REJECT_WAIT,
            ),
        };
        let token = draw_token()?;
        let started = Instant::now();
        let inserted = self
            .query(sql)
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes))
            .bind(token)
            .bind(interval(terms.retention))
            .bind(self.key.lock_id())
            .bind(lock_timeout(limit))
            .bind(terms.mode.as_str())
            .bind(terms.lease.map(interval))
            .fetch_optional(&mut *conn)
            .await
            .map_err(|error| wait_error(error, started, terms.in_flight))?;
        self.won(conn, inserted, Claim { token, attempt: 1 }).await
    }

    /// Takes over a claim that is expired, released or lapsed, in one conditional update: of N callers who saw the same token one
    /// gets it, and the others have to look again. The caller's `lock_timeout` is where the claim before has left it.
    ///
    /// Who must not wait passes over a row that somebody else has locked: it is being taken over, or swept.
    pub(crate) async fn take_over(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        found_token: i64,
        attempt: i32,
    ) -> Result<Option<Claim>, Error> {
        let (limit, pass_over_locked) = match terms.in_flight {
            InFlight::Wait(limit) => (limit, false),
            InFlight::Reject => (REJECT_WAIT, true),
        };
        let token = draw_token()?;
        let started = Instant::now();
        let updated = self
            .query(
                "
                update idempotency.record
                set mode = $9::text, fingerprint = $4::bytea,
                    token = case when pg_try_advisory_xact_lock($7::int8) is not null then $5::int8 end,
                    attempt = $12::int4, claimed_at = now(),
                    completed_at = case when $9::text = 'mark' then statement_timestamp() end,
                    lease_until = statement_timestamp() + $10::interval,
                    expires_at = statement_timestamp() + $6::interval,
                    response_status = null, response_headers = null, response_body = null,
                    last_error = case when $12::int4 > 1 then last_error end
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $11::int8
                    and (
                        (expires_at <= statement_timestamp()
                            and (lease_until is null or lease_until <= statement_timestamp()))
                        or (completed_at is null and lease_until = '-infinity')
                        or (mode = 'at_least_once' and completed_at is null and lease_until <= statement_timestamp())
                    )
                    and set_config(
                        'lock_timeout',
                        case when current_setting('lock_timeout')::interval between '1 ms' and $8::text::interval
                            then current_setting('lock_timeout')
                            else $8::text
                        end,
                        true
                    ) is not null
                    and case when $13::bool then exists (
                        select
                        from idempotency.record
                        where scope = $1::text and operation = $2::text and key = $3::text
                            and token = $11::int8
                        for update skip locked
                    ) else true end
                returning
                    set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true),
                    pg_try_advisory_xact_lock($7::int8) as locked
                ",
            )
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes))
            .bind(token)
            .bind(interval(terms.retention))
            .bind(self.key.lock_id())
            .bind(lock_timeout(limit))
            .bind(terms.mode.as_str())
            .bind(terms.lease.map(interval))
            .bind(found_token)
            .bind(attempt)
            .bind(pass_over_locked)
            .fetch_optional(&mut *conn)
            .await
            .map_err(|error| wait_error(error, started, terms.in_flight))?;
        self.won(conn, updated, Claim { token, attempt }).await
    }

    /// Makes a claim of what RETURNING says, and tries the advisory lock a last time where it was not to be had.
    async fn won(self, conn: &mut PgConnection, returned: Option<PgRow>, claim: Claim) -> Result<Option<Claim>, Error> {
        let Some(row) = returned else { return Ok(None) };
        if !row.try_get::<bool, _>("locked")? {
            sqlx::query("select pg_try_advisory_xact_lock($1::int8)")
                .persistent(self.prepared)
                .bind(self.key.lock_id())
                .execute(conn)
                .await?;
        }
        Ok(Some(claim))
    }
}

/// Random, from the operating system: a forked or restored process draws no token twice.
pub(super) fn draw_token() -> Result<i64, Error> {
    match getrandom::u64() {
        Ok(random) => Ok(random.cast_signed()),
        Err(error) => Err(Error::Database(sqlx::Error::Io(std::io::Error::other(error)))),
    }
}

pub(super) fn lock_timeout(limit: Duration) -> String {
    format!("{}ms", limit.as_millis())
}

/// 55P03 is the limit of this wait, unless it came before the limit: then it is a `lock_timeout` of the caller's own.
///
/// It has aborted the transaction. Who was willing to wait is told that the wait is over; who must not wait counts on a usable
/// transaction when he hears *in flight*, so he is told to start over.
pub(crate) fn wait_error(error: sqlx::Error, started: Instant, in_flight: InFlight) -> Error {
    if sqlstate(&error).as_deref() == Some("55P03") {
        match in_flight {
            InFlight::Wait(limit) if started.elapsed() >= limit => return Error::InFlight { retry_after: RETRY_AFTER },
            InFlight::Reject => return Error::Retryable(error),
            InFlight::Wait(_) => {}
        }
    }
    Error::of_statement(error)
}
