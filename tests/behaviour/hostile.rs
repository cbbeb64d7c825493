//! A role that may CREATE in a schema of the search path, behind pg_catalog, decides nothing, and runs nothing as
//! another role. In each database of the tests, a stranger owns `public`, and in it lookalikes, casts, and a failing
//! operator for every pair of types (script/hostile.sql). So these tests are about functions, and about the SQL of the
//! pages.

use std::time::Duration;

use pg_idempotency::lease::LeaseOptions;
use pg_idempotency::{Error, Idempotency, ensure_idempotent};
use rig::lease::{AT_MOST_ONCE, owner};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::support::{connect, create_effects, janitor, key, leave_effect, options, pool_of, waiting};

/// Functions that fit a call better than those of pg_catalog, and operators that fit exactly.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_schema_behind_pg_catalog_decides_nothing(observer: PgPool) -> anyhow::Result<()> {
    create_effects(&observer).await;
    sqlx::raw_sql(
        "create schema evil;
         create function evil.now() returns timestamptz language sql as 'select timestamptz ''2000-01-01''';
         create function evil.statement_timestamp() returns timestamptz language sql as 'select timestamptz ''2000-01-01''';
         create function evil.pg_try_advisory_xact_lock(int8) returns bool language sql as 'select true';
         create function evil.concat_ws(text, text, text) returns text language sql as 'select ''evil''';
         create function evil.format(text, text) returns text language sql as 'select ''evil''';
         create function evil.power(int4, int4) returns float8 language sql as 'select 0::float8';
         create function evil.array_remove(text[], text) returns text[] language sql as 'select ''{}''::text[]';
         create function evil.member(jsonb, jsonb) returns jsonb language sql as 'select ''true''::jsonb';
         create operator evil.-> (leftarg = jsonb, rightarg = jsonb, function = evil.member);
         create function evil.equal(oid, regclass) returns bool language sql as 'select true';
         create operator evil.= (leftarg = oid, rightarg = regclass, function = evil.equal)",
    )
    .execute(&observer)
    .await?;
    let pool = pool_of(3, &options(&observer).options([("search_path", "evil, public")])).await;
    for replay_first in [false, true] {
        let way = Idempotency::new().replay_first(replay_first);
        let value = replay_first.to_string();
        let run = async || {
            way.run(&pool, &key(&value), "body", async |conn: &mut PgConnection| leave_effect(conn, "effect").await)
                .await
        };
        assert!(!run().await?.is_replayed(), "{way:?}");
        assert!(run().await?.is_replayed(), "{way:?}");
        let keys = [key(&format!("{value} a")), key(&format!("{value} b"))];
        let mut tx = pool.begin().await?;
        let marked = pg_idempotency::mark::MarkOptions::new(Duration::from_secs(60)).mark_many(&mut tx, &keys).await?;
        assert_eq!(marked, [pg_idempotency::mark::Marked::First; 2]);
        tx.commit().await?;
    }
    // A lease that is claimed and completed, one that is live, and a sweep.
    let leasing = LeaseOptions::new(AT_MOST_ONCE);
    let lease = owner(&pool, leasing, &key("leased")).await;
    lease.complete(&7).await?;
    let _live = owner(&pool, leasing, &key("live")).await;
    assert_eq!(janitor(&pool).sweep_once(100).await?.rows(), 0);
    let wrong: i64 = sqlx::query_scalar(
        "select count(*) from idempotency.record
         where lease_until < now() or expires_at < now() or claimed_at < '2001-01-01'",
    )
    .fetch_one(&observer)
    .await?;
    assert_eq!(wrong, 0);
    let mut first = pool.begin().await?;
    let _ = ensure_idempotent(&mut first, &key("waited for"), "body", async |_| Ok::<_, Error>(1)).await?;
    let error = waiting(Duration::from_millis(30))
        .run(&pool, &key("waited for"), "body", async |conn: &mut PgConnection| leave_effect(conn, "no").await)
        .await
        .expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    first.rollback().await?;
    Ok(())
}

/// The blocks of SQL of each page, in one transaction. Roles belong to the whole server, so nothing is committed.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_sql_of_the_pages_works_beside_the_operators_of_public(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    let database: String = sqlx::query_scalar("select current_database()::text").fetch_one(&mut conn).await?;
    let is_new: bool =
        sqlx::query_scalar("select current_setting('server_version_num')::int >= 140000").fetch_one(&mut conn).await?;
    // PostgreSQL 13 lacks a setting, and only Citus has its functions.
    let runs = |statement: &str| {
        let is_too_new = !is_new && statement.contains("PostgreSQL 14 or newer");
        // A view that is there only if the server has loaded its library.
        let is_for_a_library = statement.contains("from pg_stat_statements");
        !is_too_new && !is_for_a_library && !statement.contains("citus_")
    };
    let mut count = 0;
    for page in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/guide"))? {
        let page = page?.path();
        if page.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = std::fs::read_to_string(&page)?.replace("database shop ", &format!("database \"{database}\" "));
        let sql: String = text.split("```sql\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        let mut tx = conn.begin().await?;
        tx.execute("create table orders (id bigint, currency text)").await?;
        let mut statement = String::new();
        for line in sql.split_inclusive('\n').filter(|line| !["begin;\n", "commit;\n"].contains(line)) {
            statement.push_str(line);
            let ends = line.split("--").next().is_some_and(|code| code.trim_end().ends_with(';'));
            // The body of a function has semicolons, too.
            if !ends || !statement.matches("$$").count().is_multiple_of(2) {
                continue;
            }
            if runs(&statement) {
                count += 1;
                if let Err(error) = tx.execute(AssertSqlSafe(statement.clone())).await {
                    panic!("{}: {error}:\n{statement}", page.display());
                }
            }
            statement.clear();
        }
        assert_eq!(statement.trim(), "", "{}", page.display());
        tx.rollback().await?;
    }
    assert!(count > 15, "{count} statements");
    Ok(())
}
