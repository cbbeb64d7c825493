//! Waiting for the end of another transaction.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row as _};

use super::statement::Record;
use crate::{Deployment, Error, Mode};

/// How a [wait](Record::await_key) ended. The transaction is usable in every case.
pub(crate) enum Awaited {
    /// No record is there, and this transaction holds the lock: claim.
    Claim,
    /// A record is there.
    Look,
    TimedOut,
}

impl Record<'_> {
    /// Waits for the open transaction that holds the key, for at most `limit`, or for the caller's own `lock_timeout`
    /// if that is shorter. After an owner has rolled back, exactly one of the waiting calls is told to claim: when all
    /// of them tried, 100 waiting calls and 20 rollbacks took 1300 claims in place of 121. It is a function, because a
    /// savepoint that the crate sent would remain if the wait were cancelled. The transaction does not keep the lock of
    /// an unfinished record in another mode, which it must not take over: only calls in transaction mode and marks wait
    /// here, and neither may follow another mode.
    pub(crate) async fn await_key(
        self,
        conn: &mut PgConnection,
        limit: Duration,
        asked: Option<DateTime<Utc>>,
        mode: Mode,
    ) -> Result<Awaited, Error> {
        self.query(
            "
            select /* pg_idempotency: await */
                idempotency.await_key($1::text, $2::text, $3::text, $4::int8, $5::int8, $6::timestamptz, $7::text)
            ",
        )
        .bind(self.key.lock_id()) // $4
        .bind(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX).max(1)) // $5
        .bind(asked) // $6
        .bind(mode.as_str()) // $7
        .try_map(|row| {
            Ok(match row.try_get(0)? {
                "claim" => Awaited::Claim,
                "look" => Awaited::Look,
                _ => Awaited::TimedOut,
            })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
    }
}

/// Waits 10 ms for a row that another transaction has locked without the key's advisory lock. No lock shows when such a
/// transaction ends, but all of them are short. The server sleeps, because this crate does not choose the runtime.
pub(crate) async fn wait_for_row(conn: &mut PgConnection, deployment: Deployment) -> Result<(), Error> {
    let pause =
        sqlx::query("select /* pg_idempotency: pause */ pg_catalog.pg_sleep(0.01)").persistent(deployment.prepared);
    pause.execute(conn).await.map(drop).map_err(Error::of_statement)
}
