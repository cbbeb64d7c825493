//! The janitor and the operator.

use std::time::Duration;

use pg_idempotency::operator::{self, State, Warning};
use pg_idempotency::{Error, Janitor, SetupError, distribute, migrate};
use rig::fixture::Fixture;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::{citus_alone, key, options};

#[tokio::test]
async fn the_sweep_leaves_a_record_that_is_taken_over_while_it_waits() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    citus.pool.execute("delete from idempotency.record").await?;
    let key = key("taken over");
    Fixture::completed(&key, "first", &1)?.expired().write(&citus.pool).await?;
    let mut taker = citus.pool.begin().await?;
    let taking = crate::calls().ensure(&mut taker, &key, "second", async |_| -> Result<i32, Error> { Ok(2) });
    assert!(!taking.await?.is_replayed());
    let sweep = tokio::spawn({
        let janitor = Janitor::new(citus.pool.clone()).grace(Duration::ZERO);
        async move { janitor.sweep_once(u64::MAX).await }
    });
    crate::a_moment().await;
    taker.commit().await?;
    assert_eq!(sweep.await??.rows(), 0);
    assert_eq!(operator::show(&citus.pool, &key).await?.map(|shown| shown.attempt), Some(1));
    Ok(())
}

#[tokio::test]
async fn stats_are_those_of_the_shards() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let mut conn = citus.pool.acquire().await?;
    conn.execute("delete from idempotency.record").await?;
    sqlx::query(
        "insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at, response_body)
         select 'mark', n % 50, 'filled', n, n, now(), now() + interval '1 h', null from generate_series(1, 5000) as n",
    )
    .execute(&mut *conn)
    .await?;
    conn.execute("analyze idempotency.record").await?;
    let stats = operator::stats(&citus.pool).await?;
    assert_eq!(stats.records, 5000);
    assert!(stats.table_bytes > 500_000, "{}", stats.table_bytes);
    assert!(stats.index_bytes > 200_000, "{}", stats.index_bytes);
    assert_eq!(stats.groups.len(), 1);
    assert_eq!((&*stats.groups[0].operation, stats.groups[0].state), ("filled", State::Mark));
    conn.execute("delete from idempotency.record").await?;
    Ok(())
}

#[tokio::test]
async fn health_looks_at_the_distribution_and_the_workers() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let mut conn = citus.pool.acquire().await?;
    conn.execute("delete from idempotency.record").await?;
    let names = async |pool: &PgPool| -> anyhow::Result<Vec<&'static str>> {
        let warnings = operator::health(pool, Duration::from_secs(60)).await?;
        // The server's own settings are not the matter here.
        let ours = |warning: &&Warning| match warning {
            Warning::FsyncOff => false,
            Warning::NotDurable { whose, .. } => whose.starts_with("on the worker"),
            _ => true,
        };
        Ok(warnings.iter().filter(ours).map(Warning::name).collect())
    };
    assert_eq!(names(&citus.pool).await?, Vec::<&str>::new());
    let database: String = sqlx::query_scalar("select current_database()").fetch_one(&mut *conn).await?;
    let on_workers = async |setting: &str| -> anyhow::Result<()> {
        let command = format!("set citus.enable_ddl_propagation = off; alter database \"{database}\" {setting}");
        let run = "select bool_and(success) from run_command_on_workers($1)";
        anyhow::ensure!(sqlx::query_scalar::<_, bool>(run).bind(command).fetch_one(&citus.pool).await?);
        Ok(())
    };
    on_workers("set synchronous_commit = off").await?;
    // Of new connections to the workers.
    let fresh = PgPoolOptions::new().max_connections(1).connect_with(options().expect("a URL")).await?;
    let weak = names(&fresh).await;
    on_workers("reset synchronous_commit").await?;
    assert_eq!(weak?, ["not_durable", "not_durable"]);
    // Not distributed, and then distributed.
    fresh.execute("drop schema idempotency cascade").await?;
    migrate(&citus.pool).await?;
    assert_eq!(names(&fresh).await?, ["not_distributed"]);
    distribute(&citus.pool).await?;
    distribute(&citus.pool).await?;
    assert_eq!(names(&fresh).await?, Vec::<&str>::new());
    Ok(())
}

#[tokio::test]
async fn distribute_says_why_it_refuses() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let mut conn = citus.pool.acquire().await?;
    conn.execute("drop schema idempotency cascade").await?;
    let missing = distribute(&citus.pool).await;
    assert!(matches!(missing, Err(SetupError::Other(Error::SchemaMissing { .. }))), "{missing:?}");
    migrate(&citus.pool).await?;
    sqlx::raw_sql("select create_distributed_table('idempotency.record', 'value', colocate_with => 'none')")
        .execute(&mut *conn)
        .await?;
    let other = distribute(&citus.pool).await.expect_err("by another column");
    assert!(other.to_string().contains("undistribute"), "{other:?}");
    conn.execute("drop schema idempotency cascade").await?;
    migrate(&citus.pool).await?;
    distribute(&citus.pool).await?;
    // A database without Citus.
    let name = format!("without_{}", std::process::id());
    let (create, drop) = (format!("create database {name}"), format!("drop database {name} with (force)"));
    conn.execute("set citus.enable_create_database_propagation = off").await?;
    sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut *conn).await?;
    let mut plain = PgConnection::connect_with(&options().expect("a URL").database(&name)).await?;
    plain.execute("drop extension if exists citus").await?;
    let pool = PgPool::connect_with(options().expect("a URL").database(&name)).await?;
    migrate(&pool).await?;
    let without = distribute(&pool).await.expect_err("no Citus");
    pool.close().await;
    plain.close().await?;
    sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&mut *conn).await?;
    assert!(without.to_string().contains("no Citus"), "{without:?}");
    conn.execute("reset citus.enable_create_database_propagation").await?;
    Ok(())
}
