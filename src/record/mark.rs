//! Marks in batches: one statement for new keys, and a look at those that were not new.
//!
//! Rows and locks are taken in the order of the keys, which is the same for everybody: overlapping batches queue instead of
//! deadlocking.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::claim::draw_token;
use super::statement::interval;
use crate::{Deployment, Error, Key, Mode};

/// Keys that are marked in one statement, each once and in order.
pub(crate) struct MarkBatch<'k> {
    scopes: Vec<&'k str>,
    operations: Vec<&'k str>,
    values: Vec<&'k str>,
    locks: Vec<i64>,
    window: Duration,
    deployment: Deployment,
}

/// What is under a key that was not marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Live(Mode),
    Expired,
    /// Nothing: claimed and not committed, or purged.
    Nothing,
}

/// What a batch claimed, as places in it.
pub(crate) struct Claims {
    pub(crate) won: Vec<usize>,
    /// The first key that an open transaction holds. Those after it were not tried.
    pub(crate) held: Option<usize>,
}

impl<'k> MarkBatch<'k> {
    pub(crate) fn new(keys: impl Iterator<Item = &'k Key>, window: Duration, deployment: Deployment) -> Self {
        let (scopes, operations, values, locks) = Default::default();
        let mut batch = Self { scopes, operations, values, locks, window, deployment };
        for key in keys {
            batch.scopes.push(key.scope());
            batch.operations.push(key.operation());
            batch.values.push(key.value());
            batch.locks.push(key.lock_id());
        }
        batch
    }

    /// Marks the keys that are new or expired, up to the first that an open transaction holds. So a batch that waits for that
    /// one has no key behind it, for which another batch might wait. It waits for nothing itself: an expired record whose row is
    /// locked is left alone.
    pub(crate) async fn claim_in_order(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<Claims, Error> {
        let rows = self
            .query(
                "
                with recursive asked as materialized (
                    select asked.place, asked.scope, asked.operation, asked.key, asked.lock, found.expired
                    from unnest($1::text[], $2::text[], $3::text[], $7::int8[]) with ordinality
                        as asked (scope, operation, key, lock, place)
                    -- `limit 1` keeps this an index probe for each key, whatever the planner believes of the table.
                    left join lateral (
                        select
                            record.expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp())
                                and (record.lease_until is null
                                    or record.lease_until <= pg_catalog.statement_timestamp()) as expired
                        from idempotency.record
                        where record.scope = asked.scope
                            and record.operation = asked.operation
                            and record.key = asked.key
                        limit 1
                    ) as found on true
                ),
                open as materialized (
                    select pg_catalog.array_agg(place order by place) as places, pg_catalog.array_agg(lock order by place) as locks
                    from asked
                    where expired is not false
                ),
                -- One lock after the other; the first that is not free is the last that is tried.
                tried (step, mine) as (
                    select 0, true
                    union all
                    select tried.step + 1, pg_catalog.pg_try_advisory_xact_lock(open.locks[tried.step + 1])
                    from tried, open
                    where tried.mine and tried.step < pg_catalog.cardinality(open.locks)
                ),
                mine as materialized (
                    select asked.place, asked.scope, asked.operation, asked.key, asked.expired
                    from tried, open, asked
                    where tried.step > 0 and tried.mine and asked.place = open.places[tried.step]
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
                -- In order, because an update visits rows in any order. A row that a sweep is deleting is skipped.
                free as materialized (
                    select mine.place, record.scope, record.operation, record.key
                    from mine, idempotency.record
                    where mine.expired
                        and record.scope = mine.scope and record.operation = mine.operation and record.key = mine.key
                    order by mine.place
                    for update of record skip locked
                ),
                taken as (
                    update idempotency.record
                    set mode = 'mark', fingerprint = null, token = $4::int8 + free.place, attempt = 1,
                        claimed_at = pg_catalog.now(), lease_until = null,
                        completed_at = pg_catalog.statement_timestamp(),
                        expires_at = pg_catalog.statement_timestamp() + $5::interval,
                        response_status = null, response_headers = null, response_body = null, last_error = null
                    from free
                    where record.scope = free.scope and record.operation = free.operation and record.key = free.key
                        and record.expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp())
                        and (record.lease_until is null or record.lease_until <= pg_catalog.statement_timestamp())
                    returning free.place
                )
                select place, true as won from inserted
                union all
                select place, true from taken
                union all
                select open.places[tried.step], false from tried, open where not tried.mine
                ",
            )?
            .bind(asked)
            .bind(&self.locks)
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

    /// Marks the keys that are new, without advisory locks: thousands of these would fill the server's lock table. So it waits
    /// for every open transaction that has inserted one of the keys.
    pub(crate) async fn claim_at_once(&self, conn: &mut PgConnection) -> Result<Vec<usize>, Error> {
        let places = self
            .query(
                "
                insert into idempotency.record (mode, scope, operation, key, token, completed_at, expires_at)
                select
                    'mark', asked.scope, asked.operation, asked.key, $4::int8 + asked.place,
                    pg_catalog.statement_timestamp(), pg_catalog.statement_timestamp() + $5::interval
                from unnest($1::text[], $2::text[], $3::text[]) with ordinality
                    as asked (scope, operation, key, place)
                order by asked.place
                on conflict (scope, operation, key) do nothing
                returning token - $4::int8 as place
                ",
            )?
            .fetch_all(conn)
            .await
            .map_err(Error::of_statement)?;
        places
            .iter()
            .map(|row| Ok(index(row.try_get("place")?)))
            .collect::<sqlx::Result<_>>()
            .map_err(Error::of_statement)
    }

    /// Looks at what is under the keys, in order, and says when.
    pub(crate) async fn look(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<(Option<DateTime<Utc>>, Vec<Seen>), Error> {
        let rows = sqlx::query(
            "
            select
                least($4::timestamptz, pg_catalog.statement_timestamp()) as asked,
                found.mode,
                found.expired
            from unnest($1::text[], $2::text[], $3::text[]) with ordinality as asked (scope, operation, key, place)
            left join lateral (
                select
                    record.mode,
                    record.expires_at <= least($4::timestamptz, pg_catalog.statement_timestamp())
                        and (record.lease_until is null
                            or record.lease_until <= pg_catalog.statement_timestamp()) as expired
                from idempotency.record
                where record.scope = asked.scope and record.operation = asked.operation and record.key = asked.key
                limit 1
            ) as found on true
            order by asked.place
            ",
        )
        .persistent(self.deployment.prepared)
        .bind(&self.scopes)
        .bind(&self.operations)
        .bind(&self.values)
        .bind(asked)
        .fetch_all(conn)
        .await
        .map_err(Error::of_statement)?;
        let mut first_asked = asked;
        let mut seen = Vec::with_capacity(rows.len());
        for row in rows {
            first_asked = row.try_get("asked")?;
            let mode: Option<&str> = row.try_get("mode")?;
            seen.push(match (mode, row.try_get("expired")?) {
                (None, _) => Seen::Nothing,
                (_, Some(true)) => Seen::Expired,
                (Some(mode), _) => Seen::Live(Mode::from_column(mode)?),
            });
        }
        Ok((first_asked, seen))
    }

    /// Takes over the marks of this batch that are expired; gives the places that were. The rows are locked in order first,
    /// because an update visits them in any order; it waits for rows that another transaction has locked.
    pub(crate) async fn take_over(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<Vec<usize>, Error> {
        let rows = self
            .query(
                "
                with asked as materialized (
                    select place, scope, operation, key
                    from unnest($1::text[], $2::text[], $3::text[]) with ordinality
                        as asked (scope, operation, key, place)
                ),
                locked as materialized (
                    select asked.place, record.scope, record.operation, record.key
                    from asked, idempotency.record
                    where record.scope = asked.scope and record.operation = asked.operation and record.key = asked.key
                        and record.expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp())
                        and (record.lease_until is null or record.lease_until <= pg_catalog.statement_timestamp())
                    order by asked.place
                    for update of record
                )
                update idempotency.record
                set mode = 'mark', fingerprint = null, token = $4::int8 + locked.place, attempt = 1,
                    claimed_at = pg_catalog.now(), lease_until = null,
                    completed_at = pg_catalog.statement_timestamp(),
                    expires_at = pg_catalog.statement_timestamp() + $5::interval,
                    response_status = null, response_headers = null, response_body = null, last_error = null
                from locked
                where record.scope = locked.scope and record.operation = locked.operation and record.key = locked.key
                    and record.expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp())
                    and (record.lease_until is null or record.lease_until <= pg_catalog.statement_timestamp())
                returning locked.place
                ",
            )?
            .bind(asked)
            .fetch_all(conn)
            .await
            .map_err(Error::of_statement)?;
        rows.iter()
            .map(|row| Ok(index(row.try_get("place")?)))
            .collect::<sqlx::Result<_>>()
            .map_err(Error::of_statement)
    }

    /// A statement that marks: $1 to $3 are the keys, $4 the number before the first token, $5 the window.
    fn query(&self, sql: &'static str) -> Result<Query<'_, Postgres, PgArguments>, Error> {
        // Tokens count up from a random start, which must leave room for a batch.
        let before_first_token = draw_token()? >> 1;
        Ok(sqlx::query(sql)
            .persistent(self.deployment.prepared)
            .bind(&self.scopes)
            .bind(&self.operations)
            .bind(&self.values)
            .bind(before_first_token)
            .bind(interval(self.window)))
    }
}

/// Ordinality counts from one.
fn index(place: i64) -> usize {
    usize::try_from(place - 1).unwrap_or(usize::MAX)
}
