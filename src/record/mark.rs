//! Marks in batches: one statement for new keys, and a look at the keys that were not new.
//!
//! Every batch takes rows and locks in the order of the keys, so overlapping batches queue instead of deadlocking.

mod distributed;
mod large;
mod small;

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::fragment::expired_when_asked;
use super::statement::{draw_token, interval};
use crate::{Deployment, Error, Key, Mode};

/// The keys that one statement marks. They are different and in order.
pub(crate) struct MarkBatch<'k> {
    scopes: Vec<&'k str>,
    operations: Vec<&'k str>,
    values: Vec<&'k str>,
    keys: Vec<&'k Key>,
    window: Duration,
    deployment: Deployment,
}

/// The record under a key that was not marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Live(Mode),
    Expired,
    /// No record: another transaction has claimed the key and not committed, or a sweep has deleted the record.
    Nothing,
}

/// Takes over the rows of the CTE `locked`: each becomes a mark, and nothing of the old record remains. A distributed
/// table needs `and_of_scope`, which names the shard.
macro_rules! take_over_locked {
    ($($and_of_scope:literal)?) => {
        concat! {
            "update idempotency.record
            set mode = 'mark', fingerprint = null, token = $4::int8 + locked.place, attempt = 1,
                claimed_at = pg_catalog.now(), lease_until = null,
                completed_at = pg_catalog.statement_timestamp(),
                expires_at = pg_catalog.statement_timestamp() + $5::interval,
                response_status = null, response_headers = null, response_body = null, last_error = null,
                steps = null, request = null
            from locked
            where record.scope = locked.scope and record.operation = locked.operation and record.key = locked.key
                ", $($and_of_scope,)? "
                and ", $crate::record::fragment::expired_when_asked!("$6"), "
            returning locked.place"
        }
    };
}
use take_over_locked;

impl<'k> MarkBatch<'k> {
    pub(crate) fn new(keys: impl Iterator<Item = &'k Key>, window: Duration, deployment: Deployment) -> Self {
        let keys: Vec<_> = keys.collect();
        Self {
            scopes: keys.iter().map(|key| key.scope()).collect(),
            operations: keys.iter().map(|key| key.operation()).collect(),
            values: keys.iter().map(|key| key.value()).collect(),
            keys,
            window,
            deployment,
        }
    }

    /// Looks at the records under the keys, in their order. The first value is the time of the caller's first look.
    pub(crate) async fn look(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<(Option<DateTime<Utc>>, Vec<Seen>), Error> {
        if self.deployment.distributed {
            return self.look_distributed(conn, asked).await;
        }
        let rows = self
            .of_keys(concat! {
                "
                select
                    least($4::timestamptz, pg_catalog.statement_timestamp()) as asked,
                    found.mode,
                    found.expired
                -- Subqueries, for the reason in small.rs.
                from unnest((select $1::text[]), (select $2::text[]), (select $3::text[])) with ordinality
                    as asked (scope, operation, key, place)
                -- `limit 1` keeps this an index probe for each key, whatever statistics the planner has.
                left join lateral (
                    select record.mode, ", expired_when_asked!("$4"), " as expired
                    from idempotency.record
                    where record.scope = asked.scope and record.operation = asked.operation and record.key = asked.key
                    limit 1
                ) as found on true
                order by asked.place
                ",
            })
            .bind(asked)
            .fetch_all(conn)
            .await
            .map_err(Error::of_statement)?;
        let mut first_asked = asked;
        let mut seen = Vec::with_capacity(rows.len());
        for row in rows {
            first_asked = row.try_get("asked")?;
            seen.push(match (row.try_get("mode")?, row.try_get("expired")?) {
                (None, _) => Seen::Nothing,
                (_, Some(true)) => Seen::Expired,
                (Some(mode), _) => Seen::Live(Mode::from_column(mode)?),
            });
        }
        Ok((first_asked, seen))
    }

    /// The numbers of the keys' locks. Each is a hash, so only a statement that takes locks computes them.
    fn locks(&self) -> Vec<i64> {
        self.keys.iter().map(|key| key.lock_id()).collect()
    }

    /// A statement whose parameters $1 to $3 are the keys.
    fn of_keys(&self, sql: &'static str) -> Query<'_, Postgres, PgArguments> {
        sqlx::query(sql)
            .persistent(self.deployment.prepared)
            .bind(&self.scopes)
            .bind(&self.operations)
            .bind(&self.values)
    }

    /// A statement that marks. $1 to $3 are the keys, $4 is the number before the first token, $5 is the window.
    fn marking(&self, sql: &'static str) -> Result<Query<'_, Postgres, PgArguments>, Error> {
        // Tokens count up from a random start, which must leave room for a batch.
        let before_first_token = draw_token()? >> 1;
        Ok(self.of_keys(sql).bind(before_first_token).bind(interval(self.window)))
    }
}

/// Converts an ordinality, which counts from one, into a place in the batch.
fn index(place: i64) -> usize {
    usize::try_from(place - 1).unwrap_or(usize::MAX)
}
