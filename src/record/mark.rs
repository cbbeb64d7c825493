//! Marks in batches, in one statement.
//!
//! Every batch takes locks and rows in the order of the keys, so overlapping batches queue instead of deadlocking.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::claim::note_claim;
use super::fragment::expired_when_asked;
use super::statement::{draw_token, interval};
use crate::{Deployment, Error, Key, Mode};

/// The keys that one statement marks. They are different and in order.
pub(crate) struct MarkBatch<'k> {
    pub(crate) keys: Vec<&'k Key>,
    pub(crate) retention: Duration,
    pub(crate) deployment: Deployment,
}

/// What became of a batch.
pub(crate) struct BatchMarked {
    /// When the caller first asked, by the database's clock.
    pub(crate) asked: DateTime<Utc>,
    /// One place for each key.
    pub(crate) keys: Vec<MarkOf>,
}

/// What became of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkOf {
    First,
    /// It has a live record of this mode.
    Live(Mode),
    /// An open transaction holds it.
    Held,
    /// It has an expired record, whose row a transaction has locked that does not hold the key: a sweep, or an
    /// operator.
    Locked,
    /// Nothing: the batch stopped at another key, or another transaction has recorded the key at this moment.
    Open,
}

impl MarkBatch<'_> {
    /// Marks the keys that are new or expired: all of them, or none if an open transaction holds one of them, if
    /// another transaction has locked the row of an expired one, or if one belongs to another mode. It waits for
    /// nothing.
    ///
    /// It tries one key after the other, and stops at the first that it cannot have. So a batch that then waits for
    /// that key holds no later key, for which another batch might wait.
    pub(crate) async fn mark(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<BatchMarked, Error> {
        let column = |part: fn(&Key) -> &str| self.keys.iter().map(|key| part(key)).collect::<Vec<_>>();
        let rows = sqlx::query(
            concat! {
                "
                with /* pg_idempotency: mark batch */ recursive asked as materialized (
                    select asked.place, asked.scope, asked.operation, asked.value, asked.lock, found.mode, found.expired
                    -- Each parameter is a subquery, so that its number of elements changes no estimate. Otherwise a plan
                    -- for these keys looks cheaper than the kept plan, and the server plans each call.
                    from unnest(
                        (select $1::text[]), (select $2::text[]), (select $3::text[]), (select $7::int8[])
                    ) with ordinality as asked (scope, operation, value, lock, place)
                    -- `limit 1` keeps this an index probe for each key, whatever statistics the planner has.
                    left join lateral (
                        select record.mode, ", expired_when_asked!("$6"), " as expired
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
                        pg_catalog.array_agg(lock order by place) as locks,
                        pg_catalog.array_agg(expired is not null order by place) as expired
                    from asked
                    where expired is not false
                        and not exists (select from asked where not expired and mode <> 'mark')
                        and idempotency.is_plain()
                ),
                tried (step, state) as (
                    select 0, 'mine'
                    union all
                    select
                        tried.step + 1,
                        case
                            when not pg_catalog.pg_try_advisory_xact_lock(open.locks[tried.step + 1]) then 'held'
                            when not open.expired[tried.step + 1] then 'mine'
                            -- A row that a sweep is deleting is skipped: no batch waits for a row.
                            else coalesce(
                                (
                                    select 'mine'
                                    from idempotency.record
                                    where record.scope = ($1::text[])[open.places[tried.step + 1]]
                                        and record.operation = ($2::text[])[open.places[tried.step + 1]]
                                        and record.value = ($3::text[])[open.places[tried.step + 1]]
                                    for update skip locked
                                ),
                                'locked'
                            )
                        end
                    from tried, open
                    where tried.state = 'mine' and tried.step < pg_catalog.cardinality(open.places)
                ),
                stopped as materialized (
                    select open.places[tried.step] as place, tried.state from tried, open where tried.state <> 'mine'
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
                    returning token - $4::int8 as place
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
                        steps = null, request = null, looks = null, misdirected = null, granted_attempt = null, trace = null
                    from locked
                    where record.scope = locked.scope and record.operation = locked.operation
                        and record.value = locked.value
                        and ", expired_when_asked!("$6"), "
                    returning locked.place
                ),
                won as materialized (select place from inserted union all select place from taken),
                -- The batch is one claim of its transaction, under the number before its first token.
                noted as materialized (
                    select ", note_claim!("$4::int8"), " as claims from (select from won limit 1) as any_won
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
            .persistent(self.deployment.prepared)
            .bind(column(Key::scope)) // $1
            .bind(column(Key::operation)) // $2
            .bind(column(Key::value)) // $3
            // Tokens count up from a random start, which must leave room for a batch.
            .bind(draw_token()? >> 1) // $4
            .bind(interval(self.retention)) // $5
            .bind(asked) // $6
            .bind(self.keys.iter().map(|key| key.lock_id()).collect::<Vec<_>>()) // $7
            .fetch_all(conn)
            .await
            .map_err(Error::of_statement)?;
        BatchMarked::of(&rows)
    }
}

impl BatchMarked {
    fn of(rows: &[PgRow]) -> Result<Self, Error> {
        let mut asked = DateTime::UNIX_EPOCH;
        let mut keys = Vec::with_capacity(rows.len());
        for row in rows {
            asked = row.try_get("asked")?;
            keys.push(match (row.try_get("live")?, row.try_get("state")?) {
                (Some(mode), _) => MarkOf::Live(Mode::from_column(mode)?),
                (None, Some("first")) => MarkOf::First,
                (None, Some("held")) => MarkOf::Held,
                (None, Some(_)) => MarkOf::Locked,
                (None, None) => MarkOf::Open,
            });
        }
        Ok(Self { asked, keys })
    }
}
