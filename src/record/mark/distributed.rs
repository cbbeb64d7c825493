//! Batches of marks on a table that Citus distributes. A look and an insert go to all shards of the batch in one
//! statement, a take-over to one scope at a time. As in `record/distributed.rs`, a SELECT from the table only reads
//! columns.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgArguments;
use sqlx::{Arguments as _, PgConnection, Postgres, QueryBuilder, Row as _};

use super::small::Claims;
use super::{MarkBatch, Seen, index, take_over_locked};
use crate::record::fragment::readable;
use crate::record::statement::{draw_token, interval};
use crate::{Error, Mode};

/// Rows in one insert. Citus plans one insert of a thousand rows in twice the time of four inserts of 250 (measured).
const ROWS: usize = 250;

/// What a take-over does about rows that another transaction has locked.
#[derive(Clone, Copy)]
pub(super) enum LockedRows {
    Skip,
    /// In the order of the keys, so that overlapping batches queue.
    AwaitInOrder,
}

/// Takes over the expired records of one scope, which are in one shard.
macro_rules! take_over_of_scope {
    ($locked_rows:literal) => {
        concat! {
            "
            with locked as materialized (
                select asked.place, record.scope, record.operation, record.key
                from unnest($2::text[], $3::text[]) with ordinality as asked (operation, key, place)
                join idempotency.record on record.operation = asked.operation and record.key = asked.key
                where record.scope = $1::text
                order by asked.place
                for update of record ", $locked_rows, "
            )
            ", take_over_locked!("and record.scope = $1::text")
        }
    };
}

impl MarkBatch<'_> {
    /// As [`look`](Self::look). A server without Citus plans it well too.
    pub(super) async fn look_distributed(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<(Option<DateTime<Utc>>, Vec<Seen>), Error> {
        let rows = self
            .of_keys(concat! {
                "
                select
                    asked.place, record.mode, ", readable!("record.expires_at"), " as expires_at,
                    ", readable!("record.lease_until"), " as lease_until
                from unnest($1::text[], $2::text[], $3::text[]) with ordinality as asked (scope, operation, key, place)
                join idempotency.record
                    on record.scope = asked.scope and record.operation = asked.operation and record.key = asked.key
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
        let mut seen = vec![Seen::Nothing; self.values.len()];
        for row in rows {
            let expires_at: DateTime<Utc> = row.try_get("expires_at")?;
            let lease_until: Option<DateTime<Utc>> = row.try_get("lease_until")?;
            let expired = expires_at <= asked && lease_until.is_none_or(|until| until <= now);
            seen[index(row.try_get("place")?)] =
                if expired { Seen::Expired } else { Seen::Live(Mode::from_column(row.try_get("mode")?)?) };
        }
        Ok((Some(asked), seen))
    }

    /// As [`claim_in_order`](Self::claim_in_order), in a statement each for the look, the locks, the new keys, and the
    /// expired keys of each scope.
    pub(super) async fn claim_in_order_distributed(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<Claims, Error> {
        let (asked, seen) = self.look_distributed(&mut *conn, asked).await?;
        let mut open: Vec<usize> = (0..seen.len()).filter(|&at| !matches!(seen[at], Seen::Live(_))).collect();
        let mine = self.lock_in_order(&mut *conn, &open).await?;
        let held = open.get(mine).copied();
        open.truncate(mine);
        let (expired, new): (Vec<_>, Vec<_>) = open.into_iter().partition(|&at| matches!(seen[at], Seen::Expired));
        let mut won = self.insert_distributed(&mut *conn, &new).await?;
        won.extend(self.take_over_distributed(conn, asked, &expired, LockedRows::Skip).await?);
        Ok(Claims { won, held })
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
        .bind(locks)
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)?;
        Ok(usize::try_from(mine).unwrap_or_default())
    }

    /// Marks the keys at these places that are new, and returns their places. Citus sends the rows of each shard in one
    /// statement; of a single scope, that is one shard. Its text depends on the number of keys, so it is not kept
    /// prepared.
    pub(super) async fn insert_distributed(
        &self,
        conn: &mut PgConnection,
        places: &[usize],
    ) -> Result<Vec<usize>, Error> {
        // As in `marking`.
        let before_first_token = draw_token()? >> 1;
        let mut won = Vec::with_capacity(places.len());
        for places in places.chunks(ROWS) {
            let mut arguments = PgArguments::default();
            arguments.add(interval(self.window)).map_err(sqlx::Error::Encode)?;
            let mut insert: QueryBuilder<Postgres> = QueryBuilder::with_arguments(
                "insert into idempotency.record (mode, scope, operation, key, token, completed_at, expires_at) ",
                arguments,
            );
            insert.push_values(places, |mut row, &at| {
                row.push("'mark'")
                    .push_bind(self.scopes[at])
                    .push_bind(self.operations[at])
                    .push_bind(self.values[at])
                    // Digits, so that the server has fewer parameters to read.
                    .push(before_first_token + at as i64)
                    .push("pg_catalog.statement_timestamp()")
                    .push("pg_catalog.statement_timestamp() + $1::interval");
            });
            insert.push(" on conflict (scope, operation, key) do nothing returning token");
            let tokens: Vec<i64> = insert
                .build_query_scalar()
                .persistent(false)
                .fetch_all(&mut *conn)
                .await
                .map_err(Error::of_statement)?;
            won.extend(tokens.into_iter().map(|token| index(token - before_first_token + 1)));
        }
        Ok(won)
    }

    /// Takes over the expired records at these places, and returns their places.
    pub(super) async fn take_over_distributed(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
        places: &[usize],
        locked_rows: LockedRows,
    ) -> Result<Vec<usize>, Error> {
        let sql = match locked_rows {
            LockedRows::Skip => take_over_of_scope!("skip locked"),
            LockedRows::AwaitInOrder => take_over_of_scope!(""),
        };
        let mut scopes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for &at in places {
            scopes.entry(self.scopes[at]).or_default().push(at);
        }
        let mut won = Vec::new();
        for (scope, places) in scopes {
            let of = |column: &[&str]| places.iter().map(|&at| column[at].to_owned()).collect::<Vec<_>>();
            let taken: Vec<i64> = sqlx::query_scalar(sql)
                .persistent(self.deployment.prepared)
                .bind(scope)
                .bind(of(&self.operations))
                .bind(of(&self.values))
                .bind(draw_token()? >> 1)
                .bind(interval(self.window))
                .bind(asked)
                .fetch_all(&mut *conn)
                .await
                .map_err(Error::of_statement)?;
            won.extend(taken.into_iter().map(|place| places[index(place)]));
        }
        Ok(won)
    }
}
