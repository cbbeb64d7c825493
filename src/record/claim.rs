//! The statements that win a claim. A call inserts the record, or takes over a record that is expired, released or
//! lapsed. A batch of marks inserts and takes over records in one statement.
//!
//! The primary key decides which claim wins. Until an owner's record is committed, other calls cannot see the record.
//! Other calls detect the owner by its advisory lock on a 64-bit hash of the key. So a claim does not wait in the
//! insert. The lock ends with the owner's transaction. After the claim of a lease is committed, the next transaction of
//! the lease writes the record without the lock. If a lease's claim is committed after the snapshot of another call's
//! insert, the insert can wait for the next transaction of the lease.

use std::time::Duration;

use sqlx::{PgConnection, Row as _};

use super::statement::{Record, age, draw_token, interval, may_be_retried, no_live_lease};
use super::tried::{CalledAt, Claim, Terms, Tried};
use crate::{Error, Fingerprint, Key, Mode};

/// The tokens of the claims of this transaction, from the setting `idempotency.claim`. Each claim adds its own token.
/// The setting ends with the transaction, and a rollback to a savepoint restores it. A completion knows its token, so
/// for a completion `claimed_at = now()` is enough. A look has no token, and two transactions may start in the same
/// microsecond. `xmin` would not show the transaction either, because behind a savepoint `xmin` is the id of a
/// subtransaction.
macro_rules! noted_claims {
    () => {
        "coalesce(pg_catalog.current_setting('idempotency.claim', true), '')"
    };
}

impl Record<'_> {
    /// Claims the key by inserting its record. A mark is complete at once. Returns [`Tried::Unread`] if the key has a
    /// record already, or if an open transaction claims the key. The column `claimed_at` gets its default `now()`, by
    /// which the completion detects the end of the transaction. If Citus distributes the table, `idempotency.is_plain`
    /// refuses the statement while the server plans it.
    pub(crate) async fn claim(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: &mut CalledAt,
    ) -> Result<Tried, Error> {
        let token = draw_token()?;
        let inserted = self
            .query(concat! {
                "
                insert /* pg_idempotency: claim */ into idempotency.record
                    (mode, scope, operation, value, fingerprint, token, expires_at, lease_until, completed_at)
                select
                    $8::text, $1::text, $2::text, $3::text, $5::bytea, $4::int8,
                    pg_catalog.statement_timestamp() + $6::interval,
                    pg_catalog.statement_timestamp() + $7::interval,
                    case when $8::text = 'mark' then pg_catalog.statement_timestamp() end
                where case
                    -- A replay takes no lock. No claim waits for an update or delete of a record that it sees.
                    when exists (
                        select from idempotency.record where scope = $1::text and operation = $2::text and value = $3::text
                    ) then false
                    when idempotency.is_plain() then pg_catalog.pg_try_advisory_xact_lock($9::int8)
                end
                on conflict (scope, operation, value) do nothing
                returning
                    -- The column, because Citus finds no parameter here.
                    pg_catalog.set_config('idempotency.claim', ", noted_claims!(), " || ' ' || record.token::text, true),
                    pg_catalog.clock_timestamp() - pg_catalog.now() as age
                ",
            })
            .bind(token) // $4
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
            .bind(interval(terms.retention)) // $6
            .bind(terms.lease.map(interval)) // $7
            .bind(terms.mode.as_str()) // $8
            .bind(self.key.lock_id()) // $9
            .fetch_optional(conn)
            .await
            .map_err(Error::of_statement)?;
        let Some(row) = inserted else { return Ok(Tried::Unread) };
        // The statement measures the age of the transaction after the insert. The age of the BEGIN, to which it is
        // compared, also contains a wait in the insert.
        asked.judge(age(&row)?)?;
        Ok(Tried::Won(Claim { token, attempt: 1 }))
    }
}

impl Record<'_> {
    /// Takes over a claim that is released or lapsed, or that had expired when the call was made. Only one of the
    /// callers that have found `found_token` wins: the update waits for no row, and the server checks its conditions
    /// again on the newest version of the row. The other callers look again.
    ///
    /// The earlier one of two times decides whether the record has expired: the time of the call (`$10`) and the
    /// current time. So a clock that has jumped back expires no record before its time. `idempotency.await_key` repeats
    /// the condition of the update. For an unfinished record, `await_key` also requires that the record has the mode of
    /// the call.
    ///
    /// With `attempt` 1, the call begins a new operation on an expired or a released record, whose mode and body may
    /// differ from those of the call. Between the look and this statement, a suspended owner may renew its lease under
    /// the same token, and let it lapse again. The call must not take over such a record.
    pub(crate) async fn take_over(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: &CalledAt,
        found_token: i64,
        attempt: i32,
    ) -> Result<Tried, Error> {
        let claim = Claim { token: draw_token()?, attempt };
        let (mine, free, taken): (Option<bool>, bool, bool) = self
            .query(concat! {
                "
                with /* pg_idempotency: take over */ mine as materialized (
                    -- No lock if another call has changed the record: then this call replays, and would hold the lock
                    -- until its transaction ends.
                    select case when exists (
                        select from idempotency.record
                        where scope = $1::text and operation = $2::text and value = $3::text and token = $9::int8
                    ) then pg_catalog.pg_try_advisory_xact_lock($12::int8) end as mine
                ),
                -- A row that a sweep is deleting is skipped: no call waits for a row.
                free as materialized (
                    select token
                    from idempotency.record
                    -- No join: Citus cannot lock a row of a join.
                    where (select mine.mine from mine)
                        and scope = $1::text and operation = $2::text and value = $3::text
                    for update skip locked
                ),
                taken as (
                    update idempotency.record
                    set mode = $8::text, fingerprint = $5::bytea, token = $4::int8,
                        attempt = $11::int4, granted_attempt = case when $11::int4 > 1 then granted_attempt end,
                        claimed_at = pg_catalog.now(),
                        completed_at = case when $8::text = 'mark' then pg_catalog.statement_timestamp() end,
                        lease_until = pg_catalog.statement_timestamp() + $7::interval,
                        expires_at = pg_catalog.statement_timestamp() + $6::interval,
                        response_status = null, response_headers = null, response_body = null,
                        last_error = case when $11::int4 > 1 then last_error end,
                        steps = case when $11::int4 > 1 then steps end, request = case when $11::int4 > 1 then request end,
                        probes = null
                    from free
                    where scope = $1::text and operation = $2::text and value = $3::text
                        and record.token = $9::int8
                        and ((expires_at <= least($10::timestamptz, pg_catalog.statement_timestamp())
                                and ", no_live_lease!(), ")
                            or (($11::int4 > 1 or lease_until = '-infinity')
                                and ", may_be_retried!(), "))
                    returning record.token
                )
                select
                    mine.mine, exists (select from free) as free, exists (select from taken) as taken,
                    -- Citus takes no volatile function in the RETURNING of an update.
                    (
                        select pg_catalog.set_config('idempotency.claim',
                            ", noted_claims!(), " || ' ' || taken.token::text, true)
                        from taken
                    ) as claims
                from mine
                ",
            })
            .bind(claim.token) // $4
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
            .bind(interval(terms.retention)) // $6
            .bind(terms.lease.map(interval)) // $7
            .bind(terms.mode.as_str()) // $8
            .bind(found_token) // $9
            .bind(asked.at) // $10
            .bind(attempt) // $11
            .bind(self.key.lock_id()) // $12
            .try_map(|row| Ok((row.try_get("mine")?, row.try_get("free")?, row.try_get("taken")?)))
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok(match (mine, free, taken) {
            (None, ..) | (Some(true), true, false) => Tried::Unread,
            (Some(false), ..) => Tried::Held,
            (Some(true), _, true) => Tried::Won(claim),
            (Some(true), false, false) => Tried::Locked,
        })
    }
}

/// The keys that one statement marks. The keys are different and sorted. Every batch takes locks and rows in this
/// order, so overlapping batches queue instead of deadlocking.
pub(crate) struct MarkBatch<'k> {
    pub(crate) keys: Vec<&'k Key>,
    pub(crate) retention: Duration,
    pub(crate) persistent: bool,
}

/// The result of a batch for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkOf {
    First,
    /// The key has a live record of this mode.
    Live(Mode),
    /// An open transaction holds the key.
    Held,
    /// The key has an expired record, and a sweep or an operator has locked its row. The transaction of a sweep or an
    /// operator does not hold the key.
    Locked,
    /// The batch has decided nothing about the key, because it stopped at another key, or because another transaction
    /// has just recorded this key.
    Open,
}

impl MarkBatch<'_> {
    /// Marks all keys that are new or expired, without waiting. Marks no key if one key belongs to another mode, or if
    /// one of the new or expired keys has an obstacle:
    ///
    /// - An open transaction holds the key.
    /// - Another transaction has locked the row of the expired record.
    ///
    /// The statement tries one key after another, and stops at the first key with an obstacle. So while a batch waits
    /// for a key, the batch does not hold the keys after this key, which another batch may need.
    pub(crate) async fn mark(&self, conn: &mut PgConnection, asked: &mut CalledAt) -> Result<Vec<MarkOf>, Error> {
        let column = |part: fn(&Key) -> &str| self.keys.iter().map(|key| part(key)).collect::<Vec<_>>();
        let rows = sqlx::query(
            concat! {
                "
                with /* pg_idempotency: mark batch */ asked as materialized (
                    select asked.place, asked.scope, asked.operation, asked.value, asked.lock, found.mode, found.expired
                    -- Each parameter is a subquery, so that its number of elements changes no estimate. Otherwise a plan
                    -- for these keys looks cheaper than the kept plan, and the server plans each call.
                    from unnest(
                        (select $1::text[]), (select $2::text[]), (select $3::text[]), (select $7::int8[])
                    ) with ordinality as asked (scope, operation, value, lock, place)
                    -- `limit 1` keeps this an index probe for each key, whatever statistics the planner has.
                    left join lateral (
                        select
                            record.mode,
                            (expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp())
                                and ", no_live_lease!(), ") as expired
                        from idempotency.record
                        where record.scope = asked.scope
                            and record.operation = asked.operation
                            and record.value = asked.value
                        limit 1
                    ) as found on true
                ),
                open as materialized (
                    select
                        pg_catalog.array_agg(place order by place) as places,
                        pg_catalog.array_agg(scope order by place) as scopes,
                        pg_catalog.array_agg(operation order by place) as operations,
                        pg_catalog.array_agg(value order by place) as key_values,
                        pg_catalog.array_agg(lock order by place) as locks,
                        pg_catalog.array_agg(expired is not null order by place) as expired
                    from asked
                    where expired is not false
                        and not exists (select from asked where not expired and mode <> 'mark')
                        and idempotency.is_plain()
                ),
                -- No recursive query: Citus refuses it.
                stopped as materialized (
                    select open.places[tried.step] as place, tried.state
                    from open, idempotency.lock_in_order(scopes, operations, key_values, locks, expired) as tried
                    where tried.state is not null
                ),
                mine as materialized (
                    select asked.place, asked.scope, asked.operation, asked.value, asked.expired
                    from open, asked
                    where asked.place = any (open.places) and not exists (select from stopped)
                ),
                inserted as (
                    insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
                    select
                        'mark', scope, operation, value, $4::int8 + place,
                        pg_catalog.statement_timestamp(), pg_catalog.statement_timestamp() + $5::interval
                    from mine
                    where expired is null
                    order by place
                    on conflict (scope, operation, value) do nothing
                    returning token
                ),
                locked as (select place, scope, operation, value from mine where expired),
                -- Each row becomes a mark, and nothing of the old record remains.
                taken as (
                    update idempotency.record
                    set mode = 'mark', fingerprint = null, token = $4::int8 + locked.place, attempt = 1,
                        claimed_at = pg_catalog.now(), lease_until = null,
                        completed_at = pg_catalog.statement_timestamp(),
                        expires_at = pg_catalog.statement_timestamp() + $5::interval,
                        response_status = null, response_headers = null, response_body = null, last_error = null,
                        steps = null, request = null, probes = null, granted_attempt = null
                    from locked
                    where record.scope = locked.scope and record.operation = locked.operation
                        and record.value = locked.value
                        -- As in `not_expired`, no index may match the condition.
                        and (expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp())
                            and ", no_live_lease!(), ") is true
                    returning locked.place
                ),
                won as materialized (
                    select token - $4::int8 as place from inserted union all select place from taken
                ),
                -- The batch is one claim of its transaction, under the number before its first token.
                noted as materialized (
                    select pg_catalog.set_config('idempotency.claim',
                        ", noted_claims!(), " || ' ' || $4::int8::text, true) as claims
                    from (select from won limit 1) as any_won
                )
                select
                    asked.place,
                    least($6::timestamptz, pg_catalog.statement_timestamp()) as asked,
                    case when not asked.expired then asked.mode end as live,
                    case when won.place is not null then 'first' else stopped.state end as state,
                    noted.claims
                from asked
                left join won using (place)
                left join stopped using (place)
                left join noted on true
                order by asked.place
                ",
            },
            )
            .persistent(self.persistent)
            .bind(column(Key::scope)) // $1
            .bind(column(Key::operation)) // $2
            .bind(column(Key::value)) // $3
            // The tokens of a batch count up from a random number. The shift leaves room for the tokens of the whole
            // batch.
            .bind(draw_token()? >> 1) // $4
            .bind(interval(self.retention)) // $5
            .bind(asked.at) // $6
            .bind(self.keys.iter().map(|key| key.lock_id()).collect::<Vec<_>>()) // $7
            .fetch_all(conn)
            .await
            .map_err(Error::of_statement)?;
        let mut marked = Vec::with_capacity(rows.len());
        for row in rows {
            asked.at = Some(row.try_get("asked")?);
            marked.push(match (row.try_get("live")?, row.try_get("state")?) {
                (Some(mode), _) => MarkOf::Live(Mode::from_column(mode)?),
                (None, Some("first")) => MarkOf::First,
                (None, Some("held")) => MarkOf::Held,
                (None, Some(_)) => MarkOf::Locked,
                (None, None) => MarkOf::Open,
            });
        }
        Ok(marked)
    }
}
