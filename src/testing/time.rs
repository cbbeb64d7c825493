//! The passing of time: these functions move the times of a record by the database's clock, so that no test sleeps.
//!
//! All of them take a pool or a connection. They fail with [`sqlx::Error::RowNotFound`] if the key has no committed
//! record of the kind that the function needs. A record of an open transaction cannot be moved.

use std::time::Duration;

use sqlx::PgExecutor;

use crate::record::Record;
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
    moved(record(key).move_back(executor, by).await?)
}

/// Moves the end of the retention, and of a live lease, to a moment ago. Then the key is new, whatever the state of its
/// record was, and no sweep has deleted the record yet.
///
/// # Errors
///
/// As [`age`].
pub async fn expire(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    moved(record(key).end(executor).await?)
}

/// Lets the lease lapse a moment ago, as if its owner had died long enough before.
///
/// An owner that is alive does not notice: it goes on, and its next heartbeat prolongs the lease again, unless another
/// call has taken the claim over by then.
///
/// # Errors
///
/// As [`age`]; also if the record is completed, released, or never had a lease.
pub async fn lapse(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    moved(record(key).end_lease(executor).await?)
}

fn record(key: &Key) -> Record<'_> {
    Record { key, deployment: Deployment::new() }
}

fn moved(moved: bool) -> Result<(), Error> {
    if moved { Ok(()) } else { Err(Error::Database(sqlx::Error::RowNotFound)) }
}
