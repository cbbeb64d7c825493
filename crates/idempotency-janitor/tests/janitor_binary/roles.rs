//! Least rights: what src/guide/production.md grants is enough, and a missing right is said.

use pg_idempotency::Key;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{AT_MOST_ONCE, assert_fails, expired, janitor_on, lapsed, text};

/// The least that a janitor's role needs, and the clear word where it lacks it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_role_without_rights_is_told_so(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 3).await?;
    let mut conn = pool.acquire().await?;
    let role =
        format!("janitor_{}", sqlx::query_scalar::<_, i32>("select pg_backend_pid()").fetch_one(&mut *conn).await?);
    let create = format!("create role {role} login; grant usage on schema idempotency to {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut *conn).await?;
    let as_role = options.clone().username(&role);
    let refused = janitor_on(&as_role, &["sweep"]);
    let grant = format!("grant select, delete, update (last_error) on idempotency.record to {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(grant)).execute(&mut *conn).await?;
    let swept = janitor_on(&as_role, &["sweep"]);
    let drop = format!("drop owned by {role}; drop role {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&mut *conn).await?;
    assert_fails(&refused, 1, "refused the role");
    assert_eq!(swept.status.code(), Some(0), "{}", text(&swept.stderr));
    assert!(text(&swept.stdout).starts_with("3 records deleted"), "{}", text(&swept.stdout));
    Ok(())
}

/// Runs these as a role with no rights but the ones that `src/guide/production.md` grants to `shop_…`, and gives exit
/// codes.
async fn codes_as(whose: &str, options: &PgConnectOptions, commands: &[&[&str]]) -> anyhow::Result<Vec<Option<i32>>> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let mut conn = pool.acquire().await?;
    let process: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *conn).await?;
    let role = format!("{}_{process}", whose.replace("shop_", "only_"));
    let grants: String = include_str!("../../../../src/guide/production.md")
        .lines()
        .filter(|line| line.starts_with("grant ") && line.contains(whose))
        .map(|line| format!("{} to {role};", line.split(" to ").next().unwrap_or_default()))
        .collect();
    assert!(grants.contains("usage on schema"), "{grants}");
    sqlx::raw_sql(AssertSqlSafe(format!("create role {role} login; {grants}"))).execute(&mut *conn).await?;
    let as_role = options.clone().username(&role);
    let codes = commands.iter().map(|arguments| {
        let output = janitor_on(&as_role, arguments);
        // Shown where the test fails.
        println!("{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
        assert!(!text(&output.stderr).contains("refused"), "{arguments:?}: {}", text(&output.stderr));
        output.status.code()
    });
    let codes = codes.collect();
    sqlx::raw_sql(AssertSqlSafe(format!("drop owned by {role}; drop role {role}"))).execute(&mut *conn).await?;
    Ok(codes)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_janitors_grants_are_enough_for_what_it_runs(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 3).await?;
    lapsed(&pool, &Key::new("scope", "operation", "a")?, AT_MOST_ONCE).await?;
    let commands: [&[&str]; 5] = [
        &["sweep"],
        &["stats"],
        &["unsettled", "--max-attempts", "3"],
        &["show", "scope", "operation", "a"],
        &["health"],
    ];
    let codes = codes_as("shop_janitor", &options, &commands).await?;
    // `health` warns of the throw-away server's fsync.
    assert_eq!(codes[..4], [0, 0, 3, 0].map(Some));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_operators_grants_are_enough_to_settle(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    for value in ["a", "b", "c"] {
        lapsed(&pool, &Key::new("scope", "operation", value)?, AT_MOST_ONCE).await?;
    }
    let decided = ["--reason", "a test", "--yes"];
    let commands = [
        &["unsettled"][..],
        &["show", "scope", "operation", "a"],
        &[&["resolve", "scope", "operation", "a", "--response", "1"], &decided[..]].concat(),
        &[&["release", "scope", "operation", "b"], &decided[..]].concat(),
        &[&["forget", "scope", "operation", "c"], &decided[..]].concat(),
    ];
    assert_eq!(codes_as("shop_operator", &options, &commands).await?, [3, 0, 0, 0, 0].map(Some));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn who_may_not_settle_is_told_what_is_missing(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    lapsed(&pool, &Key::new("scope", "operation", "a")?, AT_MOST_ONCE).await?;
    let mut conn = pool.acquire().await?;
    let process: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *conn).await?;
    let role = format!("reader_{process}");
    let create = format!(
        "create role {role} login; grant usage on schema idempotency to {role}; grant select on idempotency.record to {role}"
    );
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut *conn).await?;
    let as_role = options.clone().username(&role);
    let refused = ["release", "resolve"].map(|command| {
        let response: &[&str] = if command == "resolve" { &["--response", "1"] } else { &[] };
        let named = [command, "scope", "operation", "a", "--reason", "a test", "--yes"];
        janitor_on(&as_role, &[&named[..], response].concat())
    });
    sqlx::raw_sql(AssertSqlSafe(format!("drop owned by {role}; drop role {role}"))).execute(&mut *conn).await?;
    for refused in refused {
        assert_fails(&refused, 1, "a role that settles needs select, update and delete");
    }
    Ok(())
}

/// The owner of a business table, whose rights are not those of a janitor.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn who_may_not_protect_is_told_what_is_missing(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let mut conn = pool.acquire().await?;
    let process: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *conn).await?;
    let role = format!("owner_{process}");
    let create = format!(
        "create role {role} login; create schema business authorization {role};
         set role {role}; create table business.orders (id int); reset role"
    );
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut *conn).await?;
    let as_role = options.clone().username(&role);
    let refused = ["protect", "unprotect"].map(|command| janitor_on(&as_role, &[command, "business.orders"]));
    let grant =
        format!("grant usage on schema idempotency to {role}; grant select on idempotency._sqlx_migrations to {role}");
    sqlx::raw_sql(AssertSqlSafe(grant)).execute(&mut *conn).await?;
    let allowed = ["protect", "unprotect"].map(|command| janitor_on(&as_role, &[command, "business.orders"]));
    sqlx::raw_sql(AssertSqlSafe(format!("drop owned by {role}; drop role {role}"))).execute(&mut *conn).await?;
    for refused in refused {
        assert_fails(&refused, 1, "a role that protects has to own the table");
        assert!(!text(&refused.stderr).contains("janitor's"), "{}", text(&refused.stderr));
    }
    for allowed in allowed {
        assert_eq!(allowed.status.code(), Some(0), "{}", text(&allowed.stderr));
    }
    Ok(())
}

/// Otherwise an operator reads that nothing is unsettled, while a key in doubt expires.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn row_level_security_is_an_error_and_no_empty_list(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    lapsed(&pool, &Key::new("scope", "operation", "a")?, AT_MOST_ONCE).await?;
    let mut conn = pool.acquire().await?;
    let role = format!("hidden_{}", rig::database::backend(&mut conn).await?);
    let create = format!(
        "create role {role} login; grant usage on schema idempotency to {role};
         grant select, update, delete on idempotency.record to {role};
         grant select on idempotency._sqlx_migrations to {role};
         alter table idempotency.record enable row level security"
    );
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut *conn).await?;
    let as_role = options.clone().username(&role);
    let refused = [&["unsettled"][..], &["show", "scope", "operation", "a"], &["sweep"], &["stats"]]
        .map(|arguments| janitor_on(&as_role, arguments));
    let health = janitor_on(&as_role, &["health", "--json"]);
    sqlx::raw_sql(AssertSqlSafe(format!("drop owned by {role}; drop role {role}"))).execute(&mut *conn).await?;
    for refused in refused {
        assert_fails(&refused, 1, "needs bypassrls");
    }
    assert!(text(&health.stdout).contains("\"row_security\""), "{}", text(&health.stdout));
    assert_eq!(health.status.code(), Some(1));
    Ok(())
}
