//! What a test writes, counts and waits for in the database by itself.

use std::time::Instant;

use pg_idempotency::testing::PATIENCE;
use sqlx::{AssertSqlSafe, PgExecutor, PgPool};

/// What a test writes itself, in a transaction that says so. In an open transaction it holds to its end.
pub(crate) async fn outside<'c>(on: impl PgExecutor<'c>, statement: &str) {
    let exempt = format!("set local idempotency.claim = 'exempt'; {statement}");
    sqlx::raw_sql(AssertSqlSafe(exempt)).execute(on).await.expect("written");
}

pub(crate) async fn effects(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from effect").fetch_one(pool).await.expect("a count")
}

pub(crate) async fn records(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from idempotency.record").fetch_one(pool).await.expect("a count")
}

/// Waits until the database answers `true`, by asking again: the database decides, not a clock.
pub(crate) async fn until(pool: &PgPool, question: &'static str) {
    let started = Instant::now();
    loop {
        if sqlx::query_scalar::<_, bool>(question).fetch_one(pool).await.expect("an answer") {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "never true: {question}");
    }
}
