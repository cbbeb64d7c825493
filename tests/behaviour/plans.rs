//! The server plans each prepared statement a few times, and then keeps the plan.

use std::time::Duration;

use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, mark};
use pg_idempotency::{Error, Idempotency, ensure_idempotent, operator};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgPool, Row as _};

use crate::lease::reconcile;
use crate::source::statements;
use crate::support::{connect, key, pool_of};

const WINDOW: Duration = Duration::from_secs(300);
/// PostgreSQL plans a prepared statement five times with its values. Then it decides whether to keep one plan.
const CALLS: usize = 6;

/// PostgreSQL plans a statement anew for each call if the plans for the values of five calls looked cheaper. Planning a
/// batch of marks takes longer than marking ten keys.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_server_keeps_the_plan_of_each_statement(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &pool.connect_options()).await;
    let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int").fetch_one(&pool).await?;
    if version < 140_000 {
        println!("skipped: PostgreSQL 13 does not count plans");
        return Ok(());
    }
    let replay_first = Idempotency::new().replay_first(true);
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
            let _ = replay_first.run(&pool, &one, "body", async |_| Ok::<_, Error>(1)).await?;
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
async fn no_plan_asks_whether_the_table_is_plain(pool: PgPool) -> anyhow::Result<()> {
    let pool = crate::support::pool_of(1, &pool.connect_options()).await;
    let replay_first = Idempotency::new().replay_first(true);
    let _ = replay_first.run(&pool, &key("a"), "body", async |_| Ok::<_, Error>(1)).await?;
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
async fn the_search_for_operations_in_doubt_reads_the_index_of_stored_requests(pool: PgPool) -> anyhow::Result<()> {
    search_reads(&pool, "record_to_resume").await
}

#[sqlx::test(migrator = "rig::strict::PARTITIONED_MIGRATOR")]
async fn the_search_for_operations_in_doubt_reads_the_index_of_each_partition(pool: PgPool) -> anyhow::Result<()> {
    search_reads(&pool, "_operation_claimed_at_idx").await
}

async fn search_reads(pool: &PgPool, index: &str) -> anyhow::Result<()> {
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
        assert!(!reads.is_empty() && reads.iter().all(|line| line.contains(index)), "{plans}: {plan:#?}");
    }
    Ok(())
}

/// The server's own counts show the plan of the search with its values, which no prepared statement shows.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_search_by_the_beginning_of_a_value_reads_only_what_it_finds(pool: PgPool) -> anyhow::Result<()> {
    pool.execute(
        "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at, completed_at)
        select 'transaction', 'tenant', 'operation', n::text, '\\x0101', 1, now() + interval '1 day', now()
        from generate_series(1, 100000) as n",
    )
    .await?;
    pool.execute("analyze idempotency.record").await?;
    let searching = pool_of(1, &pool.connect_options()).await;
    for scope in [Some("tenant"), None] {
        let found = operator::search(&searching, scope, None, "9999", 101, WINDOW).await?;
        assert_eq!(found.len(), 11, "9999 and 99990 to 99999");
    }
    let found = operator::search(&searching, None, None, "", 20, WINDOW).await?;
    assert_eq!(found.len(), 20, "the first in the order of the index");
    // The server counts at the latest when the session ends.
    searching.close().await;
    let read = "select (sum(seq_tup_read) + sum(idx_tup_fetch))::int8 from pg_stat_user_tables
        where schemaname = 'idempotency' and relname::text like 'record%'";
    let mut records: i64 = 0;
    while records < 2 * 11 + 20 {
        records = sqlx::query_scalar(read).fetch_one(&pool).await?;
    }
    assert!(records < 100, "{records} of 100,000");
    Ok(())
}

/// What twenty thousand records have in common when a statement is planned, and how they become so.
const TABLES: [(&str, &[&str]); 6] = [
    (
        "nothing is live",
        &[FILL, "update idempotency.record set expires_at = now() - token::float8 * interval '1 s'", ANALYZE],
    ),
    (
        "nothing is expired",
        &[FILL, "update idempotency.record set expires_at = now() + token::float8 * interval '1 h'", ANALYZE],
    ),
    ("all records have one end", &[FILL, "update idempotency.record set expires_at = '2020-01-01'", ANALYZE]),
    ("never analyzed", &[FILL]),
    ("emptied by a sweep", &[FILL, ANALYZE, "delete from idempotency.record", ANALYZE]),
    (
        "half have a request",
        &[FILL, "update idempotency.record set request = '\\x01' where completed_at is null", ANALYZE],
    ),
];
/// The first half is unfinished, and the second half is completed. A tenth of each has expired.
const FILL: &str = "insert into idempotency.record
        (mode, scope, operation, value, fingerprint, token, lease_until, completed_at, expires_at)
    select
        case when n <= 10000 then 'in_steps' else 'transaction' end, 'tenant', 'operation', n::text,
        idempotency.fingerprint('body'), n,
        case when n <= 10000 then now() - interval '1 h' end,
        case when n > 10000 then now() end,
        now() + ((n % 10)::float8 - 0.5::float8) * interval '1 h'
    from generate_series(1, 20000) as n";
/// As autovacuum does.
const ANALYZE: &str = "vacuum (analyze) idempotency.record";

async fn fill(pool: &PgPool, statements: &[&'static str]) -> anyhow::Result<()> {
    pool.execute("alter table idempotency.record set (autovacuum_enabled = off); truncate idempotency.record").await?;
    // A truncated table has the statistics of the rows that it had.
    pool.execute("delete from pg_statistic where starelid = 'idempotency.record'::regclass::oid").await?;
    for statement in statements {
        sqlx::raw_sql(*statement).execute(pool).await?;
    }
    Ok(())
}

/// The scans of a plan that read the record by anything but its whole key.
fn astray(plan: &serde_json::Value) -> Vec<String> {
    let text = |name: &str| plan[name].as_str().unwrap_or_default();
    let mut found = Vec::new();
    let kind = text("Node Type");
    let reads = kind.ends_with("Scan") && (text("Relation Name") == "record" || kind == "Bitmap Index Scan");
    let by_key = text("Index Name") == "record_pkey"
        && ["scope = ", "operation = ", "value = "].iter().all(|part| text("Index Cond").contains(part));
    if reads && kind != "Bitmap Heap Scan" && !by_key {
        found.push(format!("{kind} {} {}", text("Index Name"), text("Index Cond")));
    }
    found.extend(plan["Plans"].as_array().into_iter().flatten().flat_map(astray));
    found
}

/// A condition on `expires_at` or `request` beside the key would let the planner take the index of the sweep or of the
/// resumers, where the statistics say that this index selects nothing. A session keeps such a plan, and reads a large
/// part of the table for each call.
#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]
async fn each_statement_on_one_key_reads_the_primary_key_whatever_the_statistics_say(
    pool: PgPool,
) -> anyhow::Result<()> {
    let on_a_key: Vec<_> = statements().into_iter().filter(|statement| statement.sql.contains("value = ")).collect();
    assert!(on_a_key.len() > 25, "{}", on_a_key.len());
    let mut wrong = Vec::new();
    for (table, made) in TABLES {
        fill(&pool, made).await?;
        let mut conn = connect(&pool).await;
        for statement in &on_a_key {
            let execute = statement.prepare(&mut conn).await?;
            for plans in ["force_generic_plan", "force_custom_plan"] {
                conn.execute(AssertSqlSafe(format!("set plan_cache_mode = {plans}"))).await?;
                let explain = AssertSqlSafe(format!("explain (format json) {execute}"));
                let plan: serde_json::Value = sqlx::raw_sql(explain).fetch_one(&mut conn).await?.try_get(0)?;
                let found = astray(&plan[0]["Plan"]);
                if !found.is_empty() {
                    wrong.push(format!("{table}, {plans}, {}: {found:?}", statement.name));
                }
            }
            conn.execute("deallocate planned").await?;
        }
    }
    assert!(wrong.is_empty(), "{} plans: {wrong:#?}", wrong.len());
    Ok(())
}

/// The plans of a function cannot be printed. The server counts the scans of each index in a transaction. It also counts
/// the looks of the planner at the ends of an index, which it takes only for known values. So this test says nothing
/// about the indexes that a plan for known values reads.
#[sqlx::test(migrator = "pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR")]
async fn the_functions_read_the_primary_key_whatever_the_statistics_say(pool: PgPool) -> anyhow::Result<()> {
    // A new key, a stored response, an expired record, a record that is there, one that is missing, and a wrong token.
    const CALLS: [&str; 6] = [
        "select idempotency.complete('tenant', 'operation', 'new', (idempotency.ensure('tenant', 'operation', 'new',
            idempotency.fingerprint('body'))).token)",
        "select idempotency.ensure('tenant', 'operation', '15005', idempotency.fingerprint('body'))",
        "select idempotency.ensure('tenant', 'operation', '15010', idempotency.fingerprint('body'))",
        "select idempotency.await_key('tenant', 'operation', '15005', 1, 1, now(), 'transaction')",
        "select idempotency.await_key('tenant', 'operation', 'none', 1, 1, now(), 'transaction')",
        "do $$ begin
            perform set_config('idempotency.claim', '1', true);
            perform idempotency.complete('tenant', 'operation', '15005', 1);
        exception when sqlstate 'IK002' then
        end $$",
    ];
    const SCANS: &str = "
        select
            pg_stat_get_xact_numscans('idempotency.record_pkey'::regclass) as by_key,
            pg_stat_get_xact_numscans('idempotency.record'::regclass) as of_all,
            pg_stat_get_xact_numscans('idempotency.record_expires_at'::regclass)
                + pg_stat_get_xact_numscans('idempotency.record_to_resume'::regclass) as by_others";
    let mut wrong = Vec::new();
    for (table, made) in TABLES {
        fill(&pool, made).await?;
        for plans in ["force_generic_plan", "force_custom_plan"] {
            for call in CALLS {
                let mut conn = connect(&pool).await;
                conn.execute(AssertSqlSafe(format!("set plan_cache_mode = {plans}"))).await?;
                let mut tx = conn.begin().await?;
                sqlx::raw_sql(call).execute(&mut *tx).await?;
                let scans = sqlx::raw_sql(SCANS).fetch_one(&mut *tx).await?;
                let [by_key, of_all, by_others]: [i64; 3] =
                    [scans.try_get("by_key")?, scans.try_get("of_all")?, scans.try_get("by_others")?];
                tx.rollback().await?;
                if by_key == 0 || of_all > 0 || (by_others > 0 && plans == "force_generic_plan") {
                    wrong.push(format!("{table}, {plans}: {by_key}, {of_all} and {by_others} scans: {call}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} calls: {wrong:#?}", wrong.len());
    Ok(())
}
