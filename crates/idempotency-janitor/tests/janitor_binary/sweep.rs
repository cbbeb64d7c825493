//! `sweep`, for cron.

use std::process::Command;

use pg_idempotency::Key;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, PgPool};

use crate::fixture::Fixture;
use crate::support::{assert_fails, expired, janitor_on, json, text};

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn sweep_deletes_what_is_expired(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    for n in 0..5 {
        let key = Key::new("scope", "operation", n.to_string())?;
        Fixture::completed(&key, "body", &n)?.expired().write(&pool).await?;
    }
    let key = Key::new("scope", "operation", "kept")?;
    Fixture::completed(&key, "body", &0)?.write(&pool).await?;

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

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
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

/// A terminal sees the progress, a log does not. `script` of util-linux gives the binary a terminal.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_terminal_sees_the_progress(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 12).await?;
    let sweep =
        format!("'{}' sweep --grace 0s --batch-size 4 --pause 1100ms", env!("CARGO_BIN_EXE_idempotency-janitor"));
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
    assert!(said.contains("8 records deleted so far") && said.contains("12 records deleted in 3 batches"), "{said:?}");

    expired(&pool, 12).await?;
    let output = janitor_on(&options, &["sweep", "--batch-size", "4"]);
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    Ok(())
}
