//! Batches that are small enough to take an advisory lock for each key.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row as _};

use super::{MarkBatch, index, take_over_locked};
use crate::Error;
use crate::record::citus;
use crate::record::fragment::expired_when_asked;

/// The keys that a batch has claimed, as places in it.
pub(crate) struct Claims {
    pub(crate) won: Vec<usize>,
    /// The first key that an open transaction holds. The statement did not try the keys after it.
    pub(crate) held: Option<usize>,
}

impl MarkBatch<'_> {
    /// Marks the keys that are new or expired, up to the first key that an open transaction holds, or whose expired row
    /// another transaction has locked. So a batch that waits for that key holds no later key, for which another batch
    /// might wait. The statement itself waits for nothing.
    pub(crate) async fn claim_in_order(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<Claims, Error> {
        citus::compare(conn, self.deployment).await?;
        if self.deployment.distributed {
            return self.claim_in_order_distributed(conn, asked).await;
        }
        let rows = self
            .marking(concat! {
                "
                with recursive asked as materialized (
                    select asked.place, asked.scope, asked.operation, asked.key, asked.lock, found.expired
                    -- Each parameter is a subquery, so that its number of elements changes no estimate. Otherwise a plan
                    -- for these keys looks cheaper than the kept plan, and the server plans each call.
                    from unnest(
                        (select $1::text[]), (select $2::text[]), (select $3::text[]), (select $7::int8[])
                    ) with ordinality as asked (scope, operation, key, lock, place)
                    -- `limit 1` keeps this an index probe for each key, whatever statistics the planner has.
                    left join lateral (
                        select ", expired_when_asked!("$6"), " as expired
                        from idempotency.record
                        where record.scope = asked.scope
                            and record.operation = asked.operation
                            and record.key = asked.key
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
                ),
                -- Tries one key after the other, and stops at the first key whose lock, or whose expired row, another
                -- transaction has. A large batch waits for rows in this order: it must not find a later row locked.
                tried (step, state) as (
                    select 0, 'mine'
                    union all
                    select
                        tried.step + 1,
                        case
                            when not pg_catalog.pg_try_advisory_xact_lock(open.locks[tried.step + 1]) then 'held'
                            when not open.expired[tried.step + 1] then 'mine'
                            else coalesce(
                                (
                                    select 'mine'
                                    from idempotency.record
                                    where record.scope = ($1::text[])[open.places[tried.step + 1]]
                                        and record.operation = ($2::text[])[open.places[tried.step + 1]]
                                        and record.key = ($3::text[])[open.places[tried.step + 1]]
                                    for update skip locked
                                ),
                                'row locked'
                            )
                        end
                    from tried, open
                    where tried.state = 'mine' and tried.step < pg_catalog.cardinality(open.places)
                ),
                mine as materialized (
                    select asked.place, asked.scope, asked.operation, asked.key, asked.expired
                    from tried, open, asked
                    where tried.step > 0 and tried.state = 'mine' and asked.place = open.places[tried.step]
                ),
                inserted as (
                    insert into idempotency.record (mode, scope, operation, key, token, completed_at, expires_at)
                    select
                        'mark', scope, operation, key, $4::int8 + place,
                        pg_catalog.statement_timestamp(), pg_catalog.statement_timestamp() + $5::interval
                    from mine
                    where expired is null
                    order by place
                    on conflict (scope, operation, key) do nothing
                    returning token - $4::int8 as place
                ),
                locked as (select place, scope, operation, key from mine where expired),
                taken as (", take_over_locked!(), ")
                select place, true as won from inserted
                union all
                select place, true from taken
                union all
                select open.places[tried.step], false from tried, open where tried.state = 'held'
                ",
            })?
            .bind(asked)
            .bind(self.locks())
            .fetch_all(conn)
            .await
            .map_err(Error::of_statement)?;
        let mut claims = Claims { won: Vec::with_capacity(rows.len()), held: None };
        for row in rows {
            let place = index(row.try_get("place")?);
            if row.try_get("won")? {
                claims.won.push(place);
            } else {
                claims.held = Some(place);
            }
        }
        Ok(claims)
    }
}
