//! `sweep`, for cron.

use std::process::{Command, Stdio};

use pg_idempotency::Key;
use rig::database::records;
use rig::fixture::Fixture;
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::support::{assert_fails, command_on, committed_after_an_error, expired, janitor_on, json, text};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn sweep_deletes_what_is_expired(pool: PgPool) -> anyhow::Result<()> {
    for n in 0..5 {
        let key = Key::new("scope", "operation", n.to_string())?;
        Fixture::completed(&key, "body", &n)?.expired().write(&pool).await?;
    }
    let key = Key::new("scope", "operation", "kept")?;
    Fixture::completed(&key, "body", &0)?.write(&pool).await?;

    let output = janitor_on(&pool, &["sweep"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).starts_with("5 records deleted in 1 batches: 5 completed"),
        "{}",
        text(&output.stdout)
    );
    assert_eq!(records(&pool).await, 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn json_reports_what_was_deleted(pool: PgPool) -> anyhow::Result<()> {
    expired(&pool, 7).await?;
    let report = json(&janitor_on(&pool, &["sweep", "--json", "--batch-size", "3", "--pause", "1ms"]));
    assert_eq!((&report["deleted"], &report["batches"], &report["more_left"]), (&7.into(), &3.into(), &false.into()));
    assert!(report["oldest_expired_seconds_after"].is_null(), "{report}");
    assert_eq!(janitor_on(&pool, &["sweep", "--batch-size", "0"]).status.code(), Some(2));
    Ok(())
}

/// cron mails what is on standard error. The records are gone, so no later sweep could say it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_that_fails_later_has_said_what_nobody_had_settled(pool: PgPool) -> anyhow::Result<()> {
    committed_after_an_error(&pool, &Key::new("scope", "operation", "unsettled")?).await?;
    expired(&pool, 1).await?;
    pool.execute(
        "update idempotency.record set claimed_at = now() - interval '3 d', expires_at = now() - interval '2 d'
         where completed_at is null;
         create function refuse() returns trigger language plpgsql as $$ begin raise 'on purpose'; end $$;
         create trigger refuse before delete on idempotency.record for each row
         when (old.completed_at is not null) execute function refuse()",
    )
    .await?;
    let output = janitor_on(&pool, &["sweep", "--batch-size", "1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("deleted indeterminate records"), "{}", text(&output.stderr));
    Ok(())
}

/// The connection is well, so advice about the URL or the login would mislead.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_full_disk_and_a_time_out_are_no_trouble_with_the_connection(pool: PgPool) -> anyhow::Result<()> {
    expired(&pool, 1).await?;
    for (code, says) in [("53100", "the disk of the server is full"), ("57014", "statement_timeout")] {
        let fails = format!(
            "create or replace function refuse() returns trigger language plpgsql as
                $$ begin raise 'the server says why' using errcode = '{code}'; end $$;
             drop trigger if exists refuse on idempotency.record;
             create trigger refuse before delete on idempotency.record execute function refuse()"
        );
        pool.execute(AssertSqlSafe(fails)).await?;
        let output = janitor_on(&pool, &["sweep"]);
        assert_fails(&output, 1, says);
        assert!(text(&output.stderr).contains("the server says why"), "{output:?}");
        assert!(!text(&output.stderr).contains("URL"), "{output:?}");
    }
    Ok(())
}

/// Both end it between two batches, and the report says what was deleted.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_longest_duration_and_sigterm_end_a_sweep(pool: PgPool) -> anyhow::Result<()> {
    expired(&pool, 5).await?;
    let slow = ["sweep", "--json", "--batch-size", "1", "--pause", "1h"];
    let mut output = janitor_on(&pool, &[&slow[..], &["--max-duration", "3s"]].concat());
    for left in [4, 3] {
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        assert_eq!((&json(&output)["deleted"], &json(&output)["more_left"]), (&1.into(), &true.into()));
        assert_eq!(records(&pool).await, left);
        let sweep = command_on(&pool).args(slow).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        while records(&pool).await == left {}
        assert!(Command::new("kill").args(["-TERM", &sweep.id().to_string()]).status()?.success());
        output = tokio::task::spawn_blocking(move || sweep.wait_with_output()).await??;
    }
    Ok(())
}
