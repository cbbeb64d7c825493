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
    assert_fails(&janitor(&["sweep"]), 1, "set DATABASE_URL");
    for url in ["postgres://me:hunter2@127.0.0.1:1/db", "postgres://me:hunter2@127.0.0.1:nonsense/db", "hunter2"] {
        let output = janitor(&["sweep", "--database-url", url]);
        assert_fails(&output, 1, "database URL");
        assert!(!text(&output.stderr).contains("hunter2"), "{}", text(&output.stderr));
    }
    assert_eq!(janitor(&["dance"]).status.code(), Some(2));
    assert_eq!(janitor(&[]).status.code(), Some(2));
    let help = janitor(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
}
