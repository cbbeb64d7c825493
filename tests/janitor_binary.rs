//! The binary, driven as a process: what it does, its exit codes, its one-line errors.
#![cfg(feature = "cli")]

use std::process::{Command, Output};

use pg_idempotency::{Key, schema_sql, testing};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, PgPool};

fn janitor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_idempotency-janitor"))
        .env_remove("DATABASE_URL")
        .args(arguments)
        .output()
        .expect("the binary runs")
}

/// On the database of this test.
fn janitor_on(options: &PgConnectOptions, arguments: &[&str]) -> Output {
    let url = options.to_url_lossy().to_string();
    Command::new(env!("CARGO_BIN_EXE_idempotency-janitor"))
        .env("DATABASE_URL", url)
        .args(arguments)
        .output()
        .expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// The error is one line, and names what it should.
fn assert_fails(output: &Output, code: i32, says: &str) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains(says), "{error}");
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn sweep_deletes_what_is_expired(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    for n in 0..5 {
        let key = Key::new("scope", "operation", n.to_string())?;
        testing::expired(&mut *pool.acquire().await?, &key, "body", &n).await?;
    }
    let key = Key::new("scope", "operation", "kept")?;
    testing::completed(&mut *pool.acquire().await?, &key, "body", &0).await?;

    let output = janitor_on(&options, &["sweep", "--limit", "2"]);
    assert_eq!(output.status.code(), Some(3), "stopped at its limit: {}", text(&output.stderr));
    assert!(
        text(&output.stdout).starts_with("2 records deleted in 1 batches: 2 completed"),
        "{}",
        text(&output.stdout)
    );
    let output = janitor_on(&options, &["sweep"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).starts_with("3 records deleted"), "{}", text(&output.stdout));
    let left: i64 = sqlx::query_scalar("select count(*) from idempotency.record").fetch_one(&pool).await?;
    assert_eq!(left, 1);
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn migrate_creates_the_table_and_sweep_says_when_it_is_missing(_: PgPoolOptions, options: PgConnectOptions) {
    assert_fails(&janitor_on(&options, &["sweep"]), 1, "idempotency-janitor migrate");
    for _ in 0..2 {
        let output = janitor_on(&options, &["migrate"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    assert_eq!(janitor_on(&options, &["sweep"]).status.code(), Some(0));
}

#[test]
fn migrate_prints_its_sql_without_a_database() {
    let output = janitor(&["migrate", "--print"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), schema_sql());
}

#[test]
fn errors_are_one_line_and_print_no_password() {
    assert_fails(&janitor(&["sweep"]), 2, "set DATABASE_URL");
    for (url, code) in [
        ("postgres://me:hunter2@127.0.0.1:1/db", 1),
        ("postgres://me:hunter2@127.0.0.1:nonsense/db", 2),
        ("hunter2", 2),
    ] {
        let output = janitor(&["sweep", "--database-url", url]);
        assert_fails(&output, code, "database URL");
        assert!(!text(&output.stderr).contains("hunter2"), "{}", text(&output.stderr));
    }
    assert_eq!(janitor(&["dance"]).status.code(), Some(2));
    assert_eq!(janitor(&[]).status.code(), Some(2));
    let help = janitor(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

async fn expired(pool: &PgPool, count: i32) -> anyhow::Result<()> {
    for n in 0..count {
        let key = Key::new("scope", "operation", n.to_string())?;
        testing::expired(&mut *pool.acquire().await?, &key, "body", &n).await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_dry_run_and_json_report_what_is_due(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 7).await?;
    let output = janitor_on(&options, &["sweep", "--dry-run"]);
    assert!(text(&output.stdout).starts_with("7 records are due, and none was deleted"), "{}", text(&output.stdout));
    let report = json(&janitor_on(&options, &["sweep", "--dry-run", "--json"]));
    assert_eq!((&report["due"], &report["completed"]), (&7.into(), &7.into()));
    let output =
        janitor_on(&options, &["sweep", "--json", "--max-duration", "50ms", "--batch-size", "1", "--pause", "1h"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!((&json(&output)["deleted"], &json(&output)["more_left"]), (&1.into(), &true.into()));
    let report = json(&janitor_on(&options, &["sweep", "--json", "--batch-size", "3", "--pause", "1ms"]));
    assert_eq!((&report["deleted"], &report["batches"], &report["more_left"]), (&6.into(), &2.into(), &false.into()));
    assert!(report["oldest_expired_seconds_before"].as_f64().is_some_and(|age| age > 0.0), "{report}");
    assert!(report["oldest_expired_seconds_after"].is_null(), "{report}");
    assert_fails(&janitor_on(&options, &["sweep", "--batch-size", "0"]), 2, "between 1 and 50000");
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn run_sweeps_until_sigterm_and_exits_with_success(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    for signal in ["-TERM", "-INT"] {
        expired(&pool, 20).await?;
        let daemon = Command::new(env!("CARGO_BIN_EXE_idempotency-janitor"))
            .env("DATABASE_URL", options.to_url_lossy().to_string())
            .args(["run", "--interval", "1s"])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()?;
        let started = std::time::Instant::now();
        while sqlx::query_scalar::<_, i64>("select count(*) from idempotency.record").fetch_one(&pool).await? > 0 {
            assert!(started.elapsed().as_secs() < 30, "it sweeps");
        }
        assert!(Command::new("kill").args([signal, &daemon.id().to_string()]).status()?.success());
        let output = tokio::task::spawn_blocking(move || daemon.wait_with_output()).await??;
        assert_eq!(output.status.code(), Some(0), "{signal}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("swept"), "{}", text(&output.stderr));
    }
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn stats_tell_what_is_in_the_table(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 3).await?;
    let key = Key::new("scope", "POST /orders", "kept")?;
    testing::completed(&mut *pool.acquire().await?, &key, "body", &0).await?;

    let output = janitor_on(&options, &["stats"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for part in ["POST /orders", "expired", "4 records", "oldest expired record", "#"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let report = json(&janitor_on(&options, &["stats", "--json", "--exact"]));
    assert_eq!((&report["exact"], &report["records"]), (&true.into(), &4.into()));
    let groups = report["groups"].as_array().expect("groups");
    assert!(
        groups.iter().any(|group| group["operation"] == "POST /orders"
            && group["state"] == "completed"
            && group["records"] == 1),
        "{report}"
    );
    assert_eq!(janitor_on(&options, &["stats", "--fail-if-older-than", "0s"]).status.code(), Some(3));
    assert_eq!(janitor_on(&options, &["stats", "--fail-if-older-than", "1h"]).status.code(), Some(0));
    Ok(())
}

/// From a sample: marked as an estimate, and near the truth.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn stats_of_a_large_table_are_estimates(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    sqlx::raw_sql(
        "insert into idempotency.record (mode, scope, operation, key, token, completed_at, expires_at)
         select 'mark', 's', 'o', n::text, n, now(), now() + interval '1 h' from generate_series(1, 200000) as n;
         analyze idempotency.record",
    )
    .execute(&pool)
    .await?;
    let report = json(&janitor_on(&options, &["stats", "--json"]));
    let records = report["records"].as_f64().expect("a number");
    assert_eq!(report["exact"], false);
    assert!((150_000.0..250_000.0).contains(&records), "{records}");
    assert!(text(&janitor_on(&options, &["stats"]).stdout).contains('~'));
    Ok(())
}

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

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn show_and_forget_one_key(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let key = Key::new("user:1", "POST /orders", "abc")?;
    let named = ["user:1", "POST /orders", "abc"];
    assert_fails(&janitor_on(&options, &[&["show"], &named[..]].concat()), 1, "no record");
    testing::completed(&mut *pool.acquire().await?, &key, "body", "secret response").await?;
    let output = janitor_on(&options, &[&["show"], &named[..]].concat());
    assert!(text(&output.stdout).contains("completed") && !text(&output.stdout).contains("secret"), "{output:?}");
    let shown = json(&janitor_on(&options, &[&["show", "--json"], &named[..]].concat()));
    assert_eq!((&shown["mode"], &shown["state"]), (&"transaction".into(), &"completed".into()));

    let forget = [&["forget", "--reason", "a test"], &named[..]].concat();
    assert_fails(&janitor_on(&options, &forget), 2, "--yes");
    let output = janitor_on(&options, &[&forget[..], &["--yes"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("because a test"), "{}", text(&output.stdout));
    assert_fails(&janitor_on(&options, &[&["show"], &named[..]].concat()), 1, "no record");

    use pg_idempotency::lease::{Acquired, Leasing, Policy};
    let policy = Policy::AtMostOnce { lease: std::time::Duration::from_secs(40) };
    let Acquired::Lease(_lease) = Leasing::new(policy)?.acquire::<i64, _>(&pool, &key, "body").await? else { panic!() };
    assert_fails(&janitor_on(&options, &[&forget[..], &["--yes"]].concat()), 1, "live lease");
    Ok(())
}

/// The least that a janitor's role needs, and the clear word where it lacks it.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
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

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn run_serves_metrics_and_health(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    use std::io::{BufRead as _, BufReader};
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 20).await?;
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_idempotency-janitor"))
        .env("DATABASE_URL", options.to_url_lossy().to_string())
        .args(["run", "--interval", "1s", "--metrics-addr", "127.0.0.1:0"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(daemon.stdout.take().expect("piped")).read_line(&mut line)?;
    let url = line.trim().strip_prefix("metrics on ").expect("its address").to_owned();
    let started = std::time::Instant::now();
    let text = loop {
        let text = reqwest::get(&url).await?.text().await?;
        // The gauge of states is set after the pass.
        if text.contains("idempotency_records") {
            break text;
        }
        assert!(started.elapsed().as_secs() < 30, "it sweeps\n{text}");
    };
    assert!(text.contains("idempotency_cleanup_rows_total{kind=\"completed\"} 20"), "{text}");
    let health = reqwest::get(url.replace("/metrics", "/healthz")).await?;
    assert_eq!(health.status(), 200);
    assert!(Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status()?.success());
    let status = tokio::task::spawn_blocking(move || daemon.wait()).await??;
    assert_eq!(status.code(), Some(0));
    Ok(())
}

/// A terminal sees a bar, a log does not. `script` of util-linux gives the binary a terminal.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_terminal_sees_a_progress_bar(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 12).await?;
    let sweep = format!("{} sweep --batch-size 4 --pause 150ms", env!("CARGO_BIN_EXE_idempotency-janitor"));
    let terminal = Command::new("script")
        .args(["--quiet", "--return", "--command", &sweep, "/dev/null"])
        .env("DATABASE_URL", options.to_url_lossy().to_string())
        .env("TERM", "xterm")
        .output();
    let Ok(terminal) = terminal else {
        println!("skipped: there is no `script` here to make a terminal");
        return Ok(());
    };
    let said = text(&terminal.stdout);
    assert_eq!(terminal.status.code(), Some(0), "{said}");
    assert!(said.contains("4 records deleted,") && said.contains("12 records deleted in 3 batches"), "{said:?}");

    expired(&pool, 12).await?;
    let output = janitor_on(&options, &["sweep", "--batch-size", "4"]);
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    Ok(())
}
