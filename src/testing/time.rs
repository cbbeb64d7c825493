//! Time passes when the test says so: the record is moved, by the database's clock, and nobody sleeps.
//!
//! All of these take a pool or a connection, and give [`sqlx::Error::RowNotFound`] where the key has no such record that is
//! committed: one cannot age what a transaction under way has not shown yet.

use std::time::Duration;

use sqlx::PgExecutor;
use sqlx::postgres::{PgArguments, PgQueryResult};
use sqlx::query::Query;

use super::fixture::microseconds;
use crate::{Error, Key};

/// Lets so much time pass for the record: it was claimed and completed so much earlier, and its lease and retention end so
/// much sooner.
///
/// ```no_run
/// # use pg_idempotency::{Key, testing};
/// # use std::time::Duration;
/// # async fn f(pool: sqlx::PgPool, key: Key) -> Result<(), pg_idempotency::Error> {
/// testing::age(&pool, &key, Duration::from_secs(25 * 3600)).await?; // a day, and the retention is over
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::Database`] with [`sqlx::Error::RowNotFound`] where there is no record; the database's.
pub async fn age(executor: impl PgExecutor<'_>, key: &Key, by: Duration) -> Result<(), Error> {
    let statement = of(
        key,
        "
        update idempotency.record
        -- In UTC, because a time with a zone minus an interval depends on the session, and Citus refuses that.
        set claimed_at = (claimed_at at time zone 'UTC' - $4::int8 * interval '1 microsecond') at time zone 'UTC',
            completed_at = (completed_at at time zone 'UTC' - $4::int8 * interval '1 microsecond') at time zone 'UTC',
            lease_until = (lease_until at time zone 'UTC' - $4::int8 * interval '1 microsecond') at time zone 'UTC',
            expires_at = (expires_at at time zone 'UTC' - $4::int8 * interval '1 microsecond') at time zone 'UTC'
        where scope = $1::text and operation = $2::text and key = $3::text
        ",
    );
    moved(statement.bind(microseconds(by)).execute(executor).await)
}

/// Ends the retention a moment ago, and the lease where one is live: the key is new, whatever it was, and no sweep has met
/// the record yet.
///
/// # Errors
///
/// As [`age`].
pub async fn expire(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    let statement = of(
        key,
        "
        update idempotency.record
        set expires_at = least(expires_at, statement_timestamp() - interval '1 ms'),
            lease_until = least(
                lease_until,
                -- Null where there is no lease, by a CASE that Citus takes: one without the clock.
                statement_timestamp() - interval '1 ms' + case when lease_until is not null then interval '0' end
            )
        where scope = $1::text and operation = $2::text and key = $3::text
        ",
    );
    moved(statement.execute(executor).await)
}

/// Lets the retention end so far from now. Zero is now; a lease that is live then protects the record, as it does in life.
///
/// # Errors
///
/// As [`age`].
pub async fn expire_in(executor: impl PgExecutor<'_>, key: &Key, left: Duration) -> Result<(), Error> {
    let statement = of(
        key,
        "
        update idempotency.record
        set expires_at = statement_timestamp() + $4::int8 * interval '1 microsecond'
        where scope = $1::text and operation = $2::text and key = $3::text
        ",
    );
    moved(statement.bind(microseconds(left)).execute(executor).await)
}

/// Lets the lease lapse a moment ago, as if its owner had died long enough before.
///
/// An owner that is alive does not know: it goes on, and its next heartbeat prolongs the lease again, unless somebody has
/// taken the claim over by then.
///
/// # Errors
///
/// As [`age`]; also where the record is completed, released, or never had a lease.
pub async fn lapse(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    let statement = of(
        key,
        "
        update idempotency.record
        set lease_until = least(lease_until, statement_timestamp() - interval '1 ms')
        where scope = $1::text and operation = $2::text and key = $3::text
            and completed_at is null
            and lease_until > '-infinity'
        ",
    );
    moved(statement.execute(executor).await)
}

fn of<'k>(key: &'k Key, sql: &'static str) -> Query<'k, sqlx::Postgres, PgArguments> {
    sqlx::query(sql).bind(key.scope()).bind(key.operation()).bind(key.value())
}

fn moved(result: sqlx::Result<PgQueryResult>) -> Result<(), Error> {
    match result {
        Ok(done) if done.rows_affected() == 1 => Ok(()),
        Ok(_) => Err(Error::Database(sqlx::Error::RowNotFound)),
        Err(error) => Err(Error::of_statement(error)),
    }
}
