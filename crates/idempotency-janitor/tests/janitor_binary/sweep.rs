//! `sweep`, for cron.

use pg_idempotency::Key;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::fixture::Fixture;
use crate::support::{expired, janitor_on, json, text};

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
async fn json_reports_what_was_deleted(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 7).await?;
    let output = janitor_on(&options, &["sweep", "--json", "--limit", "1"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!((&json(&output)["deleted"], &json(&output)["more_left"]), (&1.into(), &true.into()));
    let report = json(&janitor_on(&options, &["sweep", "--json", "--batch-size", "3", "--pause", "1ms"]));
    assert_eq!((&report["deleted"], &report["batches"], &report["more_left"]), (&6.into(), &2.into(), &false.into()));
    assert!(report["oldest_expired_seconds_after"].is_null(), "{report}");
    assert_eq!(janitor_on(&options, &["sweep", "--batch-size", "0"]).status.code(), Some(2));
    Ok(())
}
