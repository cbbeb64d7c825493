//! `health`.

use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::support::{assert_fails, expired, janitor_on, text};

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn health_warns_of_what_breaks_the_promise(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let set = format!("alter database {:?} set synchronous_commit = off", options.get_database().expect("a database"));
    sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&pool).await?;
    assert!(text(&janitor_on(&options, &["health"]).stdout).contains("synchronous_commit is off"));
    sqlx::raw_sql("alter table idempotency.record set unlogged").execute(&pool).await?;
    expired(&pool, 1).await?;
    let output = janitor_on(&options, &["health", "--max-lag", "0s"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1));
    for part in ["unlogged", "due for"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    sqlx::raw_sql("drop schema idempotency cascade").execute(&pool).await?;
    assert_fails(&janitor_on(&options, &["health"]), 1, "idempotency-janitor migrate");
    Ok(())
}
