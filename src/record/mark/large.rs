//! Batches with so many keys that their advisory locks would fill the server's lock table. Such a batch takes no
//! advisory locks, and waits for rows.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row as _};

use super::distributed::LockedRows;
use super::{MarkBatch, index, note_batch, take_over_locked};
use crate::Error;
use crate::record::citus;
use crate::record::distributed::pass_on_lock_timeout;
use crate::record::fragment::expired_when_asked;

impl MarkBatch<'_> {
    /// Marks the keys that are new, and returns their places. It waits for every open transaction that has inserted one
    /// of the keys.
    pub(crate) async fn claim_at_once(&self, conn: &mut PgConnection) -> Result<Vec<usize>, Error> {
        citus::compare(conn, self.deployment).await?;
        if self.deployment.distributed {
            let all: Vec<usize> = (0..self.values.len()).collect();
            pass_on_lock_timeout(conn).await?;
            return self.insert_distributed(conn, &all).await;
        }
        self.marking(concat! {
            "
            insert into idempotency.record (mode, scope, operation, key, token, completed_at, expires_at)
            select
                'mark', asked.scope, asked.operation, asked.key, $4::int8 + asked.place,
                pg_catalog.statement_timestamp(), pg_catalog.statement_timestamp() + $5::interval
            from unnest($1::text[], $2::text[], $3::text[]) with ordinality
                as asked (scope, operation, key, place)
            order by asked.place
            on conflict (scope, operation, key) do nothing
            returning token - $4::int8 as place, ", note_batch!(),
        })?
        .try_map(|row| Ok(index(row.try_get("place")?)))
        .fetch_all(conn)
        .await
        .map_err(Error::of_statement)
    }

    /// Takes over the expired records of this batch, and returns their places. It waits for rows that another
    /// transaction has locked.
    pub(crate) async fn take_over(
        &self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
    ) -> Result<Vec<usize>, Error> {
        if self.deployment.distributed {
            let all: Vec<usize> = (0..self.values.len()).collect();
            pass_on_lock_timeout(conn).await?;
            return self.take_over_distributed(conn, asked, &all, LockedRows::AwaitInOrder).await;
        }
        self.marking(concat! {
            "
            with asked as materialized (
                select place, scope, operation, key
                from unnest($1::text[], $2::text[], $3::text[]) with ordinality as asked (scope, operation, key, place)
            ),
            -- Rows are locked here, in the order of the keys, because an update visits rows in any order.
            locked as materialized (
                select asked.place, record.scope, record.operation, record.key
                from asked, idempotency.record
                where record.scope = asked.scope and record.operation = asked.operation and record.key = asked.key
                    and ", expired_when_asked!("$6"), "
                order by asked.place
                for update of record
            )
            ", take_over_locked!(), ", ", note_batch!(),
        })?
        .bind(asked)
        .try_map(|row| Ok(index(row.try_get("place")?)))
        .fetch_all(conn)
        .await
        .map_err(Error::of_statement)
    }
}
