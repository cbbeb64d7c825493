//! The server plans each prepared statement a few times, and then keeps the plan.

use std::time::Duration;

use pg_idempotency::dedup::{mark, mark_many};
use pg_idempotency::lease::{Leasing, Policy};
use pg_idempotency::{Error, Idempotency, ensure_idempotent};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgPool};

use crate::strict::partitioned;
use crate::support::key;

const WINDOW: Duration = Duration::from_secs(300);
/// PostgreSQL plans a prepared statement five times with its values. Then it decides whether to keep one plan.
const CALLS: usize = 6;

/// PostgreSQL plans a statement anew for each call if the plans for the values of five calls looked cheaper. Planning a
/// batch of marks takes longer than marking ten keys.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus plans each statement for a shard")]
async fn the_server_keeps_the_plan_of_each_statement(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool: PgPool = PgPoolOptions::new().max_connections(1).connect_with(options).await?;
    let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int").fetch_one(&pool).await?;
    if version < 140_000 {
        println!("skipped: PostgreSQL 13 does not count plans");
        return Ok(());
    }
    if partitioned() {
        println!("skipped: PostgreSQL plans for the values, because it then has one partition to plan for");
        return Ok(());
    }
    let select_first = Idempotency::new().with_select_first(true);
    let leasing = Leasing::new(Policy::AtLeastOnce { lease: Duration::from_secs(30) })?;
    for call in 0..CALLS {
        let mut conn = pool.acquire().await?;
        for _ in ["first", "replay"] {
            let mut tx = conn.begin().await?;
            let one = key(&format!("one {call}"));
            let _ = ensure_idempotent(&mut tx, &one, "body", async |_| Ok::<_, Error>(1)).await?;
            let _ = mark(&mut tx, &key(&format!("mark {call}")), WINDOW).await?;
            // Of the smallest size, for which the values change the estimates most.
            let _ = mark_many(&mut tx, &[key(&format!("batch {call}"))], WINDOW).await?;
            tx.commit().await?;
            let _ = select_first.ensure(&mut conn, &one, "body", async |_| Ok::<_, Error>(1)).await?;
        }
        drop(conn);
        for _ in ["first", "replay"] {
            let lease = key(&format!("lease {call}"));
            let _ = leasing.ensure(&pool, &lease, "body", async |_| Ok::<_, Error>(1)).await?;
        }
    }
    let planned_each_time: Vec<String> = sqlx::query_scalar(
        "select statement from pg_prepared_statements
        where statement like '%idempotency.record%' and generic_plans = 0",
    )
    .fetch_all(&pool)
    .await?;
    assert_eq!(planned_each_time, Vec::<String>::new());
    Ok(())
}

/// The function would otherwise run for each call.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(
    idempotency_distributed,
    ignore = "the table is not plain there, and Citus plans each statement for a shard"
)]
async fn a_kept_plan_does_not_ask_whether_the_table_is_plain(pool: PgPool) -> anyhow::Result<()> {
    if partitioned() {
        println!("skipped: PostgreSQL plans for the values, because it then has one partition to plan for");
        return Ok(());
    }
    let mut conn = pool.acquire().await?;
    let calls = [Idempotency::new(), Idempotency::new().with_select_first(true)];
    for call in 0..CALLS {
        for way in calls {
            let _ = way
                .ensure(&mut conn, &key(&format!("kept {call} {way:?}")), "body", async |_| Ok::<_, Error>(1))
                .await?;
        }
        let mut tx = conn.begin().await?;
        let _ = mark_many(&mut tx, &[key(&format!("kept mark {call}"))], WINDOW).await?;
        tx.commit().await?;
    }
    // The body of a function that a plan has called while it was made is no part of the plan.
    sqlx::raw_sql(
        "create or replace function idempotency.is_plain() returns boolean language plpgsql immutable as
         $$ begin raise exception 'asked' using errcode = '0A000'; end $$",
    )
    .execute(&pool)
    .await?;
    for way in calls {
        let _ = way.ensure(&mut conn, &key("kept"), "body", async |_| Ok::<_, Error>(1)).await?;
    }
    let mut tx = conn.begin().await?;
    let _ = mark_many(&mut tx, &[key("kept mark")], WINDOW).await?;
    tx.commit().await?;
    // A statement that is planned asks.
    conn.clear_cached_statements().await?;
    let asked = Idempotency::new().ensure(&mut conn, &key("asked"), "body", async |_| Ok::<_, Error>(1)).await;
    assert!(matches!(asked, Err(Error::WrongDeployment { .. })), "{asked:?}");
    Ok(())
}
