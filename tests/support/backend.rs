//! Backends: the processes of the server. Each backend serves one connection.

use std::time::Duration;

use pg_idempotency::Error;
use pg_idempotency::testing::PATIENCE;
use sqlx::{PgConnection, PgPool};
use tokio::time::{Instant, sleep};

/// The pause between two looks at the server's activity. A look is cheap, and a test should be fast.
const PAUSE: Duration = Duration::from_millis(2);

/// The process id of the backend that serves this connection.
pub(crate) async fn backend(conn: &mut PgConnection) -> Result<i32, Error> {
    Ok(sqlx::query_scalar("select pg_backend_pid()").fetch_one(conn).await?)
}

/// Waits until exactly this many statements in this database wait for a lock of another transaction, as a duplicate
/// waits for the owner of its key. It uses a connection of the pool.
pub(crate) async fn until_blocked(pool: &PgPool, statements: i64) -> Result<(), Error> {
    let started = Instant::now();
    loop {
        let blocked: i64 = sqlx::query_scalar(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
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
