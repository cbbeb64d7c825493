//! The passing of time: these functions move the times of a record by the database's clock, so that no test sleeps.
//! A clock of the tests' own would hide a comparison with the wrong clock.
//!
//! All of them take a pool or a connection. They fail with [`sqlx::Error::RowNotFound`] if the key has no committed
//! record of the kind that the function needs. A record of an open transaction cannot be moved.

use std::time::Duration;

use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgExecutor, Postgres};

use crate::record::{Record, changes_a_row, interval};
use crate::{Deployment, Error, Key};

/// Lets this much time pass for the record: it was claimed and completed earlier by that much, and its lease and
/// retention end that much sooner.
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
/// [`Error::Database`], with [`sqlx::Error::RowNotFound`] if there is no record.
pub async fn age(executor: impl PgExecutor<'_>, key: &Key, by: Duration) -> Result<(), Error> {
    let update = record(key).query(
        "
        update idempotency.record
        -- In UTC, because a time with a zone minus an interval depends on the session, and Citus refuses that.
        set claimed_at = (claimed_at at time zone 'UTC' - $4::interval) at time zone 'UTC',
            completed_at = (completed_at at time zone 'UTC' - $4::interval) at time zone 'UTC',
            lease_until = (lease_until at time zone 'UTC' - $4::interval) at time zone 'UTC',
            expires_at = (expires_at at time zone 'UTC' - $4::interval) at time zone 'UTC'
        where scope = $1::text and operation = $2::text and value = $3::text
        ",
    );
    moved(executor, update.bind(interval(by))).await
}

/// Moves the end of the retention, and of a live lease, to a moment ago. Then the key is new, whatever the state of its
/// record was, and no sweep has deleted the record yet.
///
/// # Errors
///
/// As [`age`].
pub async fn expire(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    let update = record(key).query(
        "
        update idempotency.record
        set expires_at = least(expires_at, pg_catalog.statement_timestamp() - interval '1 ms'),
            lease_until = least(
                lease_until,
                -- Null without a lease. Citus takes a CASE only without the clock.
                pg_catalog.statement_timestamp() - interval '1 ms' + case when lease_until is not null then interval '0' end
            )
        where scope = $1::text and operation = $2::text and value = $3::text
        ",
    );
    moved(executor, update).await
}

/// Lets the lease lapse a moment ago, as if its owner had died long enough before.
///
/// An owner that is alive does not notice: it goes on, and its next heartbeat prolongs the lease again, unless another
/// call has taken the claim over by then.
///
/// Over HTTP, a retry through the same router gets 409 `in-flight`, because its layer knows that its own run is alive. **A
/// second router, with a layer of its own, is the other process.** The guide's page `testing` has an example, and shows how
/// a test makes the key of a request.
///
/// # Errors
///
/// As [`age`]; also if the record is completed, released, or never had a lease.
pub async fn lapse(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    let update = record(key).query(
        "
        update idempotency.record
        set lease_until = least(lease_until, pg_catalog.statement_timestamp() - interval '1 ms')
        where scope = $1::text and operation = $2::text and value = $3::text
            and completed_at is null
            and lease_until > '-infinity'
        ",
    );
    moved(executor, update).await
}

fn record(key: &Key) -> Record<'_> {
    Record { key, deployment: Deployment::new() }
}

async fn moved(executor: impl PgExecutor<'_>, update: Query<'_, Postgres, PgArguments>) -> Result<(), Error> {
    let moved = changes_a_row(executor, update).await?;
    if moved { Ok(()) } else { Err(Error::Database(sqlx::Error::RowNotFound)) }
}
