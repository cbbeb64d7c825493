//! Winning the right to perform: by inserting the record, or by taking over one that is expired, released or lapsed. A mark
//! is a claim that is complete at once.
//!
//! The primary key decides who wins. The advisory lock, a 64-bit hash of the key, lets others *see* an owner whose record is
//! not committed yet, so that no claim has to wait in the insert to find out. It ends with the owner's transaction.

use std::num::NonZeroU32;
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row as _};

use super::{Record, interval};
use crate::{Deployment, Error, Fingerprint, InFlight, Mode};

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

/// What became of a [take-over](Record::take_over).
pub(crate) enum TakeOver {
    Won(Claim),
    /// An open transaction has the key.
    Held,
    /// The record is not what it was: look again.
    Overtaken,
    /// The row is gone, or locked by a transaction without the key: a sweep, an operator, a large batch of marks.
    Locked,
}

/// How a [wait](Record::await_key) ended. The transaction is usable in every case.
pub(crate) enum Awaited {
    /// Nothing is there, and this transaction has the lock: claim.
    Claim,
    /// A record is there.
    Look,
    TimedOut,
}

impl Record<'_> {
    /// Claims the key by inserting its record; `None` where one is in the way, or an open transaction that claims it.
    pub(crate) async fn claim(self, conn: &mut PgConnection, terms: &Terms) -> Result<Option<Claim>, Error> {
        let token = draw_token()?;
        let inserted = self
            .query(
                "
                insert into idempotency.record
                    (mode, scope, operation, key, fingerprint, token, expires_at, lease_until, completed_at)
                select
                    $9::text, $1::text, $2::text, $3::text, $4::bytea, $5::int8,
                    pg_catalog.statement_timestamp() + $6::interval,
                    pg_catalog.statement_timestamp() + $8::interval,
                    case when $9::text = 'mark' then pg_catalog.statement_timestamp() end
                where case
                    -- A replay takes no lock, and no claim waits in the insert for an update or delete of the record.
                    when exists (
                        select from idempotency.record where scope = $1::text and operation = $2::text and key = $3::text
                    ) then false
                    else pg_catalog.pg_try_advisory_xact_lock($7::int8)
                end
                on conflict (scope, operation, key) do nothing
                ",
            )
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes))
            .bind(token)
            .bind(interval(terms.retention))
            .bind(self.key.lock_id())
            .bind(terms.lease.map(interval))
            .bind(terms.mode.as_str())
            .execute(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok((inserted.rows_affected() == 1).then_some(Claim { token, attempt: 1 }))
    }

    /// Takes over a claim that was expired at `asked`, or is released or lapsed, in one conditional update: of N callers who
    /// saw the same token one gets it, and the others look again.
    pub(crate) async fn take_over(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: DateTime<Utc>,
        found_token: i64,
        attempt: i32,
    ) -> Result<TakeOver, Error> {
        let token = draw_token()?;
        let row = self
            .query(
                "
                with mine as materialized (select pg_catalog.pg_try_advisory_xact_lock($7::int8) as mine),
                -- A row that a sweep is deleting is skipped: no call waits for a row.
                free as materialized (
                    select record.token
                    from mine, idempotency.record
                    where mine.mine
                        and record.scope = $1::text and record.operation = $2::text and record.key = $3::text
                    for update of record skip locked
                ),
                taken as (
                    update idempotency.record
                    set mode = $9::text, fingerprint = $4::bytea, token = $5::int8,
                        attempt = $12::int4, claimed_at = pg_catalog.now(),
                        completed_at = case when $9::text = 'mark' then pg_catalog.statement_timestamp() end,
                        lease_until = pg_catalog.statement_timestamp() + $8::interval,
                        expires_at = pg_catalog.statement_timestamp() + $6::interval,
                        response_status = null, response_headers = null, response_body = null,
                        last_error = case when $12::int4 > 1 then last_error end
                    from free
                    where scope = $1::text and operation = $2::text and key = $3::text
                        and record.token = $10::int8
                        and (
                            (expires_at <= least($11::timestamptz, pg_catalog.statement_timestamp())
                                and (lease_until is null or lease_until <= pg_catalog.statement_timestamp()))
                            or (completed_at is null and lease_until = '-infinity')
                            or (mode = 'at_least_once' and completed_at is null
                                and lease_until <= pg_catalog.statement_timestamp())
                        )
                    returning true
                )
                select mine.mine, exists (select from free) as free, exists (select from taken) as taken
                from mine
                ",
            )
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes))
            .bind(token)
            .bind(interval(terms.retention))
            .bind(self.key.lock_id())
            .bind(terms.lease.map(interval))
            .bind(terms.mode.as_str())
            .bind(found_token)
            .bind(asked)
            .bind(attempt)
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        let (mine, free, taken): (bool, bool, bool) =
            (row.try_get("mine")?, row.try_get("free")?, row.try_get("taken")?);
        Ok(match (mine, free, taken) {
            (false, ..) => TakeOver::Held,
            (true, _, true) => TakeOver::Won(Claim { token, attempt }),
            (true, true, false) => TakeOver::Overtaken,
            (true, false, false) => TakeOver::Locked,
        })
    }

    /// Waits for the open transaction that holds the key, `limit` at most, or the caller's own `lock_timeout` where that is
    /// shorter. Of all who wait for an owner that rolls back, one is told to claim.
    pub(crate) async fn await_key(
        self,
        conn: &mut PgConnection,
        limit: Duration,
        asked: Option<DateTime<Utc>>,
    ) -> Result<Awaited, Error> {
        let row = self
            .query("select idempotency.await_key($1::text, $2::text, $3::text, $4::int8, $5::int8, $6::timestamptz)")
            .bind(self.key.lock_id())
            .bind(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX).max(1))
            .bind(asked)
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok(match row.try_get::<&str, _>(0)? {
            "claim" => Awaited::Claim,
            "look" => Awaited::Look,
            _ => Awaited::TimedOut,
        })
    }
}

/// Waits a moment for a row that is locked by a transaction without the key. No lock tells its end, and such transactions are
/// short; on the server, because this crate does not choose the runtime.
pub(crate) async fn wait_for_row(conn: &mut PgConnection, deployment: Deployment) -> Result<(), Error> {
    let pause = sqlx::query("select pg_catalog.pg_sleep(0.01)").persistent(deployment.prepared);
    pause.execute(conn).await.map(drop).map_err(Error::of_statement)
}

/// Random, from the operating system: a forked or restored process draws no token twice.
pub(crate) fn draw_token() -> Result<i64, Error> {
    match getrandom::u64() {
        Ok(random) => Ok(random.cast_signed()),
        Err(error) => Err(Error::Database(sqlx::Error::Io(std::io::Error::other(error)))),
    }
}
