//! Backends: the processes of the server. Each backend serves one connection.

use std::time::Duration;

use sqlx::{Connection as _, PgConnection, PgPool};
use tokio::time::{Instant, sleep};

use super::gate::PATIENCE;
use crate::Error;

/// The pause between two looks at the server's activity. A look is cheap, and a test should be fast.
const PAUSE: Duration = Duration::from_millis(2);

/// The process id of the backend that serves this connection, for [`kill_backend`].
///
/// # Errors
///
/// Errors of the database.
pub async fn backend(conn: &mut PgConnection) -> Result<i32, Error> {
    Ok(sqlx::query_scalar("select pg_backend_pid()").fetch_one(conn).await?)
}

/// Kills a backend, as a crash of its client's machine or an operator does, and waits until the backend is gone. Then
/// its transaction is rolled back, and its locks are free. This function opens a connection of its own.
///
/// ```no_run
/// # use pg_idempotency::{Error, Idempotency, Key, testing};
/// # async fn f(pool: sqlx::PgPool, key: Key) -> Result<(), Error> {
/// let killed = Idempotency::new()
///     .run(&pool, &key, "tea", async |conn| -> Result<i32, Error> {
///         testing::kill_backend(&pool, testing::backend(&mut *conn).await?).await?;
///         Ok(sqlx::query_scalar("insert into orders (what) values ('tea') returning id").fetch_one(conn).await?)
///     })
///     .await;
/// assert!(killed.is_err());
/// testing::assert_no_trace(&pool, &key).await;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// Errors of the database. It is not an error if the backend is gone already.
///
/// # Panics
///
/// After [`PATIENCE`]. PostgreSQL ends a backend at the next point where that is safe.
pub async fn kill_backend(pool: &PgPool, backend: i32) -> Result<(), Error> {
    let mut conn = PgConnection::connect_with(&pool.connect_options()).await?;
    let started = Instant::now();
    loop {
        // Each round kills again, because a signal to a process that has just begun may be lost.
        let there: bool = sqlx::query_scalar(
            "
            select coalesce(bool_or(pg_terminate_backend(pid)), false)
            from pg_catalog.pg_stat_activity
            where pid = $1::int4
            ",
        )
        .bind(backend)
        .fetch_one(&mut conn)
        .await?;
        if !there {
            return Ok(conn.close().await?);
        }
        assert!(started.elapsed() < PATIENCE, "backend {backend} still runs");
        sleep(PAUSE).await;
    }
}

/// Waits until exactly this many statements in this database wait for a lock of another transaction, as a duplicate
/// waits for the owner of its key. It uses a connection of the pool.
///
/// ```no_run
/// # use pg_idempotency::{Error, Key, testing};
/// # async fn place_order(_: sqlx::PgPool, _: Key) -> Result<i32, Error> { Ok(17) }
/// # async fn f(pool: sqlx::PgPool, key: Key) -> Result<(), Box<dyn std::error::Error>> {
/// let first = testing::in_flight(&pool, &key, "tea").await?;
/// let duplicate = tokio::spawn(place_order(pool.clone(), key.clone()));
/// testing::until_blocked(&pool, 1).await?;
/// first.complete(&17).await?;
/// assert_eq!(duplicate.await??, 17);
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// Errors of the database.
///
/// # Panics
///
/// After [`PATIENCE`].
pub async fn until_blocked(pool: &PgPool, statements: i64) -> Result<(), Error> {
    let started = Instant::now();
    loop {
        let blocked: i64 = sqlx::query_scalar(
            "
            select count(*)
            from pg_catalog.pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock'
            ",
        )
        .fetch_one(pool)
        .await?;
        if blocked == statements {
            return Ok(());
        }
        assert!(started.elapsed() < PATIENCE, "{blocked} statements are blocked, {statements} were expected");
        sleep(PAUSE).await;
    }
}
