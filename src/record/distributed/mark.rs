//! Batches of marks on a table that Citus distributes. A look and an insert go to all shards of the batch in one
//! statement, a take-over to one scope at a time. As in `record/distributed.rs`, a SELECT from the table only reads
//! columns.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgArguments;
use sqlx::{Arguments as _, PgConnection, Postgres, QueryBuilder, Row as _};

use super::citus::warn_if_plain;
use super::coordinator::note_claim;
use crate::record::fragment::readable;
use crate::record::mark::{BatchMarked, MarkBatch, MarkOf, index, take_over_locked};
use crate::record::statement::{draw_token, interval};
use crate::{Error, Key, Mode};

/// Takes over the expired records of one scope, which are in one shard.
macro_rules! take_over_of_scope {
    () => {
        concat! {
            "
            with locked as materialized (
                select asked.place, record.scope, record.operation, record.value
                from unnest($2::text[], $3::text[]) with ordinality as asked (operation, value, place)
                join idempotency.record on record.operation = asked.operation and record.value = asked.value
                where record.scope = $1::text
                order by asked.place
                for update of record skip locked
            )
            ", take_over_locked!("and record.scope = $1::text")
        }
    };
}

/// As [`MarkBatch::mark`], in a statement each for the look, the time, the locks, the new keys, and the expired keys of each
/// scope. An expired record whose row is locked does not stop the others.
pub(crate) async fn mark(
    batch: &MarkBatch<'_>,
    conn: &mut PgConnection,
    asked: Option<DateTime<Utc>>,
) -> Result<BatchMarked, Error> {
    warn_if_plain(&mut *conn).await?;
    let mut marking = batch.look(&mut *conn, asked).await?;
    let keys = &mut marking.keys;
    if keys.iter().any(|key| matches!(key, MarkOf::Live(mode) if *mode != Mode::Mark)) {
        return Ok(marking);
    }
    let open: Vec<usize> = (0..keys.len()).filter(|&at| !matches!(keys[at], MarkOf::Live(_))).collect();
    let mine = batch.lock_in_order(&mut *conn, &open).await?;
    if let Some(&held) = open.get(mine) {
        keys[held] = MarkOf::Held;
        return Ok(marking);
    }
    let (expired, new): (Vec<_>, Vec<_>) = open.into_iter().partition(|&at| keys[at] == MarkOf::Expired);
    let before_first_token = draw_token()? >> 1;
    let mut won = batch.insert(&mut *conn, before_first_token, &new).await?;
    won.extend(batch.take_over(&mut *conn, before_first_token, marking.asked, &expired).await?);
    if !won.is_empty() {
        note_claim(conn, batch.deployment, before_first_token).await?;
    }
    for at in won {
        keys[at] = MarkOf::First;
    }
    Ok(marking)
}

impl MarkBatch<'_> {
    async fn look(&self, conn: &mut PgConnection, asked: Option<DateTime<Utc>>) -> Result<BatchMarked, Error> {
        let rows = self
            .of_keys(concat! {
                "
                select
                    asked.place, record.mode, ", readable!("record.expires_at"), " as expires_at,
                    ", readable!("record.lease_until"), " as lease_until
                from unnest($1::text[], $2::text[], $3::text[]) with ordinality as asked (scope, operation, value, place)
                join idempotency.record
                    on record.scope = asked.scope and record.operation = asked.operation and record.value = asked.value
                -- Shards without a scope of the batch are not asked.
                where record.scope = any ($1::text[])
                ",
            })
            .fetch_all(&mut *conn)
            .await
            .map_err(Error::of_statement)?;
        let now: DateTime<Utc> = sqlx::query_scalar("select pg_catalog.statement_timestamp()")
            .persistent(self.deployment.prepared)
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        let asked = asked.map_or(now, |first| first.min(now));
        let mut keys = vec![MarkOf::Open; self.keys.len()];
        for row in rows {
            let expires_at: DateTime<Utc> = row.try_get("expires_at")?;
            let lease_until: Option<DateTime<Utc>> = row.try_get("lease_until")?;
            let expired = expires_at <= asked && lease_until.is_none_or(|until| until <= now);
            keys[index(row.try_get("place")?)] =
                if expired { MarkOf::Expired } else { MarkOf::Live(Mode::from_column(row.try_get("mode")?)?) };
        }
        Ok(BatchMarked { asked, keys })
    }

    /// Takes one lock after the other, and returns how many. The first lock that is not free is the last one that is
    /// tried.
    async fn lock_in_order(&self, conn: &mut PgConnection, places: &[usize]) -> Result<usize, Error> {
        let locks: Vec<i64> = places.iter().map(|&at| self.keys[at].lock_id()).collect();
        let mine: i64 = sqlx::query_scalar(
            "
            with recursive tried (step, mine) as (
                select 0, true
                union all
                select step + 1, pg_catalog.pg_try_advisory_xact_lock(($1::int8[])[step + 1])
                from tried
                where mine and step < pg_catalog.cardinality($1::int8[])
            )
            select count(*) filter (where mine and step > 0) from tried
            ",
        )
        .persistent(self.deployment.prepared)
        .bind(locks) // $1
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)?;
        Ok(usize::try_from(mine).unwrap_or_default())
    }

    /// Marks the keys at these places that are new, and returns their places. Citus sends the rows of each shard in one
    /// statement; of a single scope, that is one shard. Its text depends on the number of keys, so it is not kept
    /// prepared.
    async fn insert(
        &self,
        conn: &mut PgConnection,
        before_first_token: i64,
        places: &[usize],
    ) -> Result<Vec<usize>, Error> {
        if places.is_empty() {
            return Ok(Vec::new());
        }
        let mut arguments = PgArguments::default();
        arguments.add(interval(self.retention)).map_err(sqlx::Error::Encode)?;
        let mut insert: QueryBuilder<Postgres> = QueryBuilder::with_arguments(
            "insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at) ",
            arguments,
        );
        insert.push_values(places, |mut row, &at| {
            row.push("'mark'")
                .push_bind(self.keys[at].scope())
                .push_bind(self.keys[at].operation())
                .push_bind(self.keys[at].value())
                // Digits, so that the server has fewer parameters to read.
                .push(before_first_token + 1 + at as i64)
                .push("pg_catalog.statement_timestamp()")
                .push("pg_catalog.statement_timestamp() + $1::interval");
        });
        insert.push(" on conflict (scope, operation, value) do nothing returning token");
        let tokens: Vec<i64> =
            insert.build_query_scalar().persistent(false).fetch_all(conn).await.map_err(Error::of_statement)?;
        Ok(tokens.into_iter().map(|token| index(token - before_first_token)).collect())
    }

    /// Takes over the expired records at these places, and returns their places.
    async fn take_over(
        &self,
        conn: &mut PgConnection,
        before_first_token: i64,
        asked: DateTime<Utc>,
        places: &[usize],
    ) -> Result<Vec<usize>, Error> {
        let mut scopes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for &at in places {
            scopes.entry(self.keys[at].scope()).or_default().push(at);
        }
        let mut won = Vec::new();
        for (scope, places) in scopes {
            let of =
                |part: fn(&Key) -> &str| places.iter().map(|&at| part(self.keys[at]).to_owned()).collect::<Vec<_>>();
            let taken: Vec<i64> = sqlx::query_scalar(take_over_of_scope!())
                .persistent(self.deployment.prepared)
                .bind(scope) // $1
                .bind(of(Key::operation)) // $2
                .bind(of(Key::value)) // $3
                .bind(before_first_token) // $4
                .bind(interval(self.retention)) // $5
                .bind(asked) // $6
                .fetch_all(&mut *conn)
                .await
                .map_err(Error::of_statement)?;
            won.extend(taken.into_iter().map(|place| places[index(place)]));
        }
        Ok(won)
    }
}
