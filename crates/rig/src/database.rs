//! What a test writes, counts and waits for in the database by itself.

use std::time::Duration;

use crate::gate::PATIENCE;
use pg_idempotency::Error;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgConnection, PgExecutor, PgPool};
use tokio::time::{Instant, sleep};

/// The pause between two looks at the server's activity. A look is cheap, and a test should be fast.
const PAUSE: Duration = Duration::from_millis(2);

/// The way to the database of a test, for a pool that is not the one that the test got.
pub fn options(pool: &PgPool) -> PgConnectOptions {
    (*pool.connect_options()).clone()
}

/// A pool of so many connections. A call waits for one of them as long as a test may wait.
pub async fn pool_of(connections: u32, options: &PgConnectOptions) -> PgPool {
    let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(PATIENCE);
    pool.connect_with(options.clone()).await.expect("a pool")
}

/// The process id of the backend that serves this connection.
pub async fn backend(conn: &mut PgConnection) -> Result<i32, Error> {
    Ok(sqlx::query_scalar("select pg_backend_pid()").fetch_one(conn).await?)
}

/// Waits until exactly this many statements in this database wait for a lock of another transaction, as a duplicate
/// waits for the owner of its key. It uses a connection of the pool.
pub async fn until_blocked(pool: &PgPool, statements: i64) -> Result<(), Error> {
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

/// What a test writes itself, in a transaction that says so. In an open transaction it holds to its end.
pub async fn outside<'c>(on: impl PgExecutor<'c>, statement: &str) {
    let exempt = format!("set local idempotency.claim = 'exempt'; {statement}");
    sqlx::raw_sql(AssertSqlSafe(exempt)).execute(on).await.expect("written");
}

pub async fn effects(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from effect").fetch_one(pool).await.expect("a count")
}

pub async fn records(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from idempotency.record").fetch_one(pool).await.expect("a count")
}

/// A value of the only record.
pub async fn recorded<T>(pool: &PgPool, what: &str) -> T
where
    (T,): for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow>,
    T: Send + Unpin,
{
    let asked = AssertSqlSafe(format!("select {what} from idempotency.record"));
    sqlx::query_scalar(asked).fetch_one(pool).await.expect("one record")
}

/// Waits until the database answers `true`, by asking again: the database decides, not a clock.
pub async fn until(pool: &PgPool, question: &'static str) {
    let started = Instant::now();
    loop {
        if sqlx::query_scalar::<_, bool>(question).fetch_one(pool).await.expect("an answer") {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "never true: {question}");
    }
}
