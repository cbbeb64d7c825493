//! Marks in batches: one statement for a thousand keys, another one only for those that have expired.
//!
//! No advisory locks: thousands of them would fill the server's lock table. The wait for other transactions is bounded as in
//! a single claim. Rows are touched in the order of the keys, which is the same for everybody, so that overlapping batches
//! queue instead of deadlocking.

use std::time::{Duration, Instant};

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::claim::{REJECT_WAIT, draw_token, lock_timeout, wait_error};
use super::interval;
use crate::{Error, InFlight, Key, Mode};

/// Keys that are asked for in one statement, each once and in order.
pub(crate) struct MarkBatch<'k> {
    scopes: Vec<&'k str>,
    operations: Vec<&'k str>,
    values: Vec<&'k str>,
    pub(crate) window: Duration,
    pub(crate) in_flight: InFlight,
    pub(crate) prepared: bool,
}

/// What stands under a key that was not inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Live(Mode),
    Expired,
    /// Committed after the statement's snapshot, or purged since: to be asked for again.
    Unseen,
}

impl<'k> MarkBatch<'k> {
    pub(crate) fn new(
        keys: impl Iterator<Item = &'k Key>,
        window: Duration,
        in_flight: InFlight,
        prepared: bool,
    ) -> Self {
        let mut batch =
            Self { scopes: Vec::new(), operations: Vec::new(), values: Vec::new(), window, in_flight, prepared };
        for key in keys {
            batch.scopes.push(key.scope());
            batch.operations.push(key.operation());
            batch.values.push(key.value());
        }
        batch
    }

    /// Inserts the marks that are not there; gives the places in the batch of the others, and what stands there.
    ///
    /// The outer select sees the table as it was before: what was inserted is known by `inserted`, and a record that
    /// another transaction has committed meanwhile is not seen at all. It is an aggregate because it must give a row, and
    /// put back the caller's `lock_timeout`, also when nothing is left to tell. `limit 1` keeps the look-up an index probe
    /// for each key, whatever the planner believes of the table.
    pub(crate) async fn insert(&self, conn: &mut PgConnection) -> Result<Vec<(usize, Standing)>, Error> {
        let row = self
            .run(
                conn,
                "
                with caller as materialized (
                    select case
                        when set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true) is not null
                        then set_config(
                            'lock_timeout',
                            case when current_setting('lock_timeout')::interval between '1 ms' and $6::text::interval
                                then current_setting('lock_timeout')
                                else $6::text
                            end,
                            true
                        )
                    end as lock_timeout
                ),
                asked as materialized (
                    select place, scope, operation, key
                    from unnest($1::text[], $2::text[], $3::text[]) with ordinality
                        as asked (scope, operation, key, place)
                ),
                inserted as (
                    insert into idempotency.record (mode, scope, operation, key, token, completed_at, expires_at)
                    select
                        'mark', asked.scope, asked.operation, asked.key, $4::int8 + asked.place,
                        statement_timestamp(), statement_timestamp() + $5::interval
                    from caller, asked
                    where caller.lock_timeout is not null
                    order by asked.place
                    on conflict (scope, operation, key) do nothing
                    returning token - $4::int8 as place
                )
                select
                    set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true),
                    array_agg(asked.place) as places,
                    array_agg(found.mode) as modes,
                    array_agg(found.expired) as expired
                from asked
                left join inserted on inserted.place = asked.place
                left join lateral (
                    select
                        record.mode,
                        record.expires_at <= statement_timestamp()
                            and (record.lease_until is null or record.lease_until <= statement_timestamp()) as expired
                    from idempotency.record
                    where record.scope = asked.scope
                        and record.operation = asked.operation
                        and record.key = asked.key
                    limit 1
                ) as found on true
                where inserted.place is null
                ",
            )
            .await?;
        let places: Option<Vec<i64>> = row.try_get("places")?;
        let modes: Option<Vec<Option<String>>> = row.try_get("modes")?;
        let expired: Option<Vec<Option<bool>>> = row.try_get("expired")?;
        let (places, modes, expired) =
            (places.unwrap_or_default(), modes.unwrap_or_default(), expired.unwrap_or_default());
        places
            .into_iter()
            .zip(modes.into_iter().zip(expired))
            .map(|(place, (mode, expired))| {
                let standing = match (mode.as_deref(), expired) {
                    (None, _) => Standing::Unseen,
                    (_, Some(true)) => Standing::Expired,
                    (Some(mode), _) => Standing::Live(Mode::from_column(mode)?),
                };
                Ok((index(place), standing))
            })
            .collect()
    }

    /// Takes over the marks of this batch that are expired; gives the places that were. The rows are locked in order
    /// first, because an update visits them as it likes.
    pub(crate) async fn take_over(&self, conn: &mut PgConnection) -> Result<Vec<usize>, Error> {
        let row = self
            .run(
                conn,
                "
                with caller as materialized (
                    select set_config(
                        'lock_timeout',
                        case when current_setting('lock_timeout')::interval between '1 ms' and $6::text::interval
                            then current_setting('lock_timeout')
                            else $6::text
                        end,
                        true
                    ) as lock_timeout
                ),
                asked as materialized (
                    select place, scope, operation, key
                    from unnest($1::text[], $2::text[], $3::text[]) with ordinality
                        as asked (scope, operation, key, place)
                ),
                locked as materialized (
                    select asked.place, record.scope, record.operation, record.key
                    from caller, asked, idempotency.record
                    where caller.lock_timeout is not null
                        and record.scope = asked.scope
                        and record.operation = asked.operation
                        and record.key = asked.key
                        and record.expires_at <= statement_timestamp()
                        and (record.lease_until is null or record.lease_until <= statement_timestamp())
                    order by asked.place
                    for update of record
                ),
                taken as (
                    update idempotency.record
                    set mode = 'mark', fingerprint = null, token = $4::int8 + locked.place, attempt = 1,
                        claimed_at = now(), lease_until = null, completed_at = statement_timestamp(),
                        expires_at = statement_timestamp() + $5::interval,
                        response_status = null, response_headers = null, response_body = null, last_error = null
                    from locked
                    where record.scope = locked.scope
                        and record.operation = locked.operation
                        and record.key = locked.key
                        and record.expires_at <= statement_timestamp()
                        and (record.lease_until is null or record.lease_until <= statement_timestamp())
                    returning locked.place
                )
                select
                    set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true),
                    array_agg(place) as places
                from taken
                ",
            )
            .await?;
        let places: Option<Vec<i64>> = row.try_get("places")?;
        Ok(places.unwrap_or_default().into_iter().map(index).collect())
    }

    async fn run(&self, conn: &mut PgConnection, sql: &'static str) -> Result<PgRow, Error> {
        let limit = match self.in_flight {
            InFlight::Wait(limit) => limit,
            InFlight::Reject => REJECT_WAIT,
        };
        // Tokens count up from a random start, which must leave room for a batch.
        let first_token = draw_token()? >> 1;
        let started = Instant::now();
        let query: Query<'_, Postgres, PgArguments> = sqlx::query(sql).persistent(self.prepared);
        query
            .bind(&self.scopes)
            .bind(&self.operations)
            .bind(&self.values)
            .bind(first_token)
            .bind(interval(self.window))
            .bind(lock_timeout(limit))
            .fetch_one(conn)
            .await
            .map_err(|error| wait_error(error, started, self.in_flight))
    }
}

/// Ordinality counts from one.
fn index(place: i64) -> usize {
    usize::try_from(place - 1).unwrap_or(usize::MAX)
}
