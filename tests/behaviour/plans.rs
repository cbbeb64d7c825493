//! The server plans each prepared statement a few times, and then keeps the plan.

use std::time::Duration;

use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, mark};
use pg_idempotency::{Error, Idempotency, RoundTrips, ensure_idempotent, operator};
use rig::strict::partitioned;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgPool, Row as _};

use crate::lease::reconcile;
use crate::support::{key, pool_of};

const WINDOW: Duration = Duration::from_secs(300);
/// PostgreSQL plans a prepared statement five times with its values. Then it decides whether to keep one plan.
const CALLS: usize = 6;

/// PostgreSQL plans a statement anew for each call if the plans for the values of five calls looked cheaper. Planning a
/// batch of marks takes longer than marking ten keys.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus plans each statement for a shard")]
async fn the_server_keeps_the_plan_of_each_statement(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &pool.connect_options()).await;
    let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int").fetch_one(&pool).await?;
    if version < 140_000 {
        println!("skipped: PostgreSQL 13 does not count plans");
        return Ok(());
    }
    if partitioned() {
        println!("skipped: PostgreSQL plans for the values, because it then has one partition to plan for");
        return Ok(());
    }
    let select_first = Idempotency::new().round_trips(RoundTrips::SelectFirst);
    let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: Duration::from_secs(30) });
    for call in 0..CALLS {
        for _ in ["first", "replay"] {
            let mut tx = pool.begin().await?;
            let one = key(&format!("one {call}"));
            let _ = ensure_idempotent(&mut tx, &one, "body", async |_| Ok::<_, Error>(1)).await?;
            let _ = mark(&mut tx, &key(&format!("mark {call}")), WINDOW).await?;
            // Of the smallest size, for which the values change the estimates most.
            let _ = MarkOptions::new(WINDOW).mark_many(&mut tx, &[key(&format!("batch {call}"))]).await?;
            tx.commit().await?;
            let _ = select_first.run(&pool, &one, "body", async |_| Ok::<_, Error>(1)).await?;
        }
        for _ in ["first", "replay"] {
            let lease = key(&format!("lease {call}"));
            let _ = leasing.run(&pool, &lease, "body", async |_| Ok::<_, Error>(1)).await?;
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
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "the table is not plain there")]
async fn no_plan_asks_whether_the_table_is_plain(pool: PgPool) -> anyhow::Result<()> {
    if partitioned() {
        println!("skipped: with the values, which are null here, the server reads no partition");
        return Ok(());
    }
    let pool = crate::support::pool_of(1, &pool.connect_options()).await;
    let select_first = Idempotency::new().round_trips(RoundTrips::SelectFirst);
    let _ = select_first.run(&pool, &key("a"), "body", async |_| Ok::<_, Error>(1)).await?;
    let mut conn = pool.acquire().await?;
    let mut tx = conn.begin().await?;
    let _ = MarkOptions::new(WINDOW).mark_many(&mut tx, &[key("batch")]).await?;
    tx.commit().await?;
    let statements: Vec<(String, i32)> = sqlx::query_as(
        "select name, cardinality(parameter_types) from pg_prepared_statements
        where statement like '%idempotency.is_plain()%' and name like 'sqlx%'",
    )
    .persistent(false)
    .fetch_all(&mut *conn)
    .await?;
    assert_eq!(statements.len(), 3, "the select, the claim and the batch: {statements:?}");
    // With the values, which are null here, the server would leave out more.
    conn.execute("set plan_cache_mode = force_generic_plan").await?;
    for (volatility, asks) in [("immutable", false), ("volatile", true)] {
        let alter = format!("alter function idempotency.is_plain() {volatility}");
        sqlx::raw_sql(AssertSqlSafe(alter)).execute(&mut *conn).await?;
        for (name, parameters) in &statements {
            let values = vec!["null"; usize::try_from(*parameters)?].join(", ");
            let explain = format!("explain (verbose, costs off) execute {name}({values})");
            let rows = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(&mut *conn).await?;
            let plan: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
            assert_eq!(plan.iter().any(|line| line.contains("is_plain")), asks, "{volatility}: {plan:#?}");
        }
    }
    Ok(())
}

/// The index holds only operations that have stored their request. The search must not read the others, of which there
/// may be ten million.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus plans each statement for all shards")]
async fn the_search_for_operations_in_doubt_reads_the_index_of_stored_requests(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &pool.connect_options()).await;
    reconcile::in_doubt(&pool, "a").await;
    pool.execute(
        "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at, completed_at)
        select 'at_most_once', 'tenant' || n::text, 'operation', n::text, '\\x0101', 1, now() + interval '1 day', now()
        from generate_series(1, 20000) as n",
    )
    .await?;
    // Of many scopes, because the plan of an empty partition says nothing.
    pool.execute("analyze idempotency.record").await?;
    let reconciler = reconcile::reconciler();
    for _ in 0..CALLS {
        let looked_up = async |_: &InDoubt| Ok::<_, Error>(Finding::Unknown);
        let _ = reconciler.visit_one(&pool, looked_up).await?;
        reconcile::pass_time(&pool).await;
    }
    let name: String = sqlx::query_scalar(
        "select name from pg_prepared_statements where statement like '%pg_idempotency: doubts%' and name like 'sqlx%'",
    )
    .persistent(false)
    .fetch_one(&pool)
    .await?;
    for plans in ["force_generic_plan", "force_custom_plan"] {
        pool.execute(AssertSqlSafe(format!("set plan_cache_mode = {plans}"))).await?;
        let explain = format!("explain (costs off) execute {name}('operation', 'at_most_once', 32, 0)");
        let rows = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(&pool).await?;
        let plan: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        let reads: Vec<_> = plan.iter().filter(|line| line.contains("Scan")).collect();
        let index = if partitioned() { "_operation_claimed_at_idx" } else { "record_to_resume" };
        assert!(!reads.is_empty() && reads.iter().all(|line| line.contains(index)), "{plans}: {plan:#?}");
    }
    Ok(())
}

/// The server's own counts show the plan of the search with its values, which no prepared statement shows.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus plans each statement for all shards")]
async fn a_search_by_the_beginning_of_a_value_reads_only_what_it_finds(pool: PgPool) -> anyhow::Result<()> {
    pool.execute(
        "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at, completed_at)
        select 'transaction', 'tenant', 'operation', n::text, '\\x0101', 1, now() + interval '1 day', now()
        from generate_series(1, 100000) as n",
    )
    .await?;
    pool.execute("analyze idempotency.record").await?;
    let searching = pool_of(1, &pool.connect_options()).await;
    let found = operator::search(&searching, Some("tenant"), Some("operation"), "9999", 101, WINDOW).await?;
    assert_eq!(found.len(), 11, "9999 and 99990 to 99999");
    // The server counts at the latest when the session ends.
    searching.close().await;
    let read = "select (sum(seq_tup_read) + sum(idx_tup_fetch))::int8 from pg_stat_user_tables
        where schemaname = 'idempotency' and relname::text like 'record%'";
    let mut records: i64 = 0;
    while records < 11 {
        records = sqlx::query_scalar(read).fetch_one(&pool).await?;
    }
    assert!(records < 100, "{records} of 100,000");
    Ok(())
}
