//! The metrics of the crate: their names, which dashboards and alerts rely on, and what they count.

use std::num::NonZeroU32;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use pg_idempotency::lease::{Acquired, Lease, LeaseOptions, LeaseOwner};
use pg_idempotency::mark::MarkOptions;
use pg_idempotency::{Error, Idempotency, Janitor, Key, Outcome, testing};
use rig::lease::{AT_MOST_ONCE, IN_STEPS};
use sqlx::PgPool;

fn key(operation: &str, value: &str) -> Key {
    Key::new("a scope nobody may see", operation, value).expect("a valid key")
}

/// One runtime thread and one recorder for it: tests do not meet.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn outcomes_durations_and_sweeps_are_counted(pool: PgPool) -> anyhow::Result<()> {
    let recorder = PrometheusBuilder::new().build_recorder();
    let exported = recorder.handle();
    let _guard = metrics::set_default_local_recorder(&recorder);

    let run = async |value: &str, body: &str| -> Result<Outcome<i64>, Error> {
        let key = key("POST /orders", value);
        Idempotency::new().run(&pool, &key, body, async |_| Ok::<_, Error>(1)).await
    };
    for _ in 0..3 {
        let _ = run("secret-value", "body").await?;
    }
    run("secret-value", "another").await.expect_err("key reused");
    let failing = key("POST /orders", "failing");
    let failed: Result<Outcome<i64>, Error> =
        Idempotency::new().run(&pool, &failing, "body", async |_| Err(Error::Database(sqlx::Error::RowNotFound))).await;
    failed.expect_err("perform fails");

    // It fails after everything that the crate does but the COMMIT.
    sqlx::raw_sql("create table deferred (n int unique deferrable initially deferred)").execute(&pool).await?;
    let uncommitted: Result<Outcome<i64>, Error> = Idempotency::new()
        .run(&pool, &key("POST /deferred", "1"), "body", async |conn| {
            sqlx::query("insert into deferred values (1), (1)").execute(conn).await?;
            Ok(1)
        })
        .await;
    uncommitted.expect_err("the COMMIT fails");

    let lost = key("charge", "lost");
    let error = LeaseOptions::new(AT_MOST_ONCE)
        .run(&pool, &lost, "body", async |_| {
            sqlx::query("delete from idempotency.record where operation = 'charge'").execute(&pool).await?;
            Ok::<_, Error>(1)
        })
        .await
        .expect_err("lost");
    assert!(matches!(error, Error::LeaseLost), "{error:?}");

    let mut tx = pool.begin().await?;
    let marks = [key("event", "1"), key("event", "2"), key("event", "1")];
    let marked = MarkOptions::new(Duration::from_millis(1)).mark_many(&mut tx, &marks).await?;
    assert_eq!(marked.len(), 3);
    tx.commit().await?;
    sqlx::query("update idempotency.record set expires_at = now() - interval '1 s' where mode = 'mark'")
        .execute(&pool)
        .await?;
    assert_eq!(Janitor::new(pool.clone()).grace(Duration::ZERO).sweep_once(10).await?.marks, 2);

    let text = exported.render();
    for line in [
        r#"idempotency_outcomes_total{mode="transaction",operation="POST /orders",outcome="performed"} 1"#,
        r#"idempotency_outcomes_total{mode="transaction",operation="POST /orders",outcome="replayed"} 2"#,
        r#"idempotency_outcomes_total{mode="transaction",operation="POST /orders",outcome="key_reused"} 1"#,
        r#"idempotency_outcomes_total{mode="transaction",operation="POST /orders",outcome="failed"} 1"#,
        r#"idempotency_outcomes_total{mode="transaction",operation="POST /deferred",outcome="error"} 1"#,
        r#"idempotency_outcomes_total{mode="at_most_once",operation="charge",outcome="lease_lost"} 1"#,
        r#"idempotency_outcomes_total{mode="mark",operation="event",outcome="performed"} 2"#,
        r#"idempotency_outcomes_total{mode="mark",operation="event",outcome="replayed"} 1"#,
        r#"idempotency_perform_duration_seconds_count{mode="transaction",operation="POST /orders"} 2"#,
        r#"idempotency_claim_wait_seconds_count{mode="transaction",operation="POST /orders"} 5"#,
        "idempotency_lease_lost_total 1",
        r#"idempotency_cleanup_rows_total{kind="marks"} 2"#,
        "idempotency_cleanup_batch_duration_seconds_count 1",
        "idempotency_oldest_expired_age_seconds 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert_eq!(text.matches(r#"operation="POST /deferred",outcome="#).count(), 1, "nothing else is said of it\n{text}");
    assert!(!text.contains("secret-value") && !text.contains("nobody may see"), "never the key or its scope\n{text}");
    Ok(())
}

/// Otherwise the alert about the lag would stay silent while no sweep succeeds.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_lag_of_a_sweep_that_always_fails_is_exported(pool: PgPool) -> anyhow::Result<()> {
    let recorder = PrometheusBuilder::new().build_recorder();
    let exported = recorder.handle();
    let _guard = metrics::set_default_local_recorder(&recorder);
    crate::support::expired(&pool, 1).await?;
    sqlx::raw_sql(
        "create function refuse() returns trigger language plpgsql as $$ begin raise 'on purpose'; end $$;
         create trigger refuse before delete on idempotency.record for each row execute function refuse()",
    )
    .execute(&pool)
    .await?;
    let janitor = Janitor::new(pool).grace(Duration::ZERO).interval(Duration::from_secs(1));
    let lags = async {
        let is_lag = |line: &str| {
            line.strip_prefix("idempotency_oldest_expired_age_seconds ").is_some_and(|age| !age.starts_with('0'))
        };
        while !exported.render().lines().any(is_lag) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(rig::gate::PATIENCE, janitor.run(lags)).await?;
    // No batch has succeeded. Without this value, the first increase would be lost to the alert.
    let text = exported.render();
    assert!(text.contains("idempotency_cleanup_rows_total{kind=\"indeterminate\"} 0"), "{text}");
    Ok(())
}

/// However a step ends in doubt, it is counted once for each time that it was asked for.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn steps_and_resumed_operations_are_counted(pool: PgPool) -> anyhow::Result<()> {
    let recorder = PrometheusBuilder::new().build_recorder();
    let exported = recorder.handle();
    let _guard = metrics::set_default_local_recorder(&recorder);

    let leasing = LeaseOptions::new(IN_STEPS).store_request(true).max_attempts(NonZeroU32::new(3).expect("three"));
    let leasing = leasing.resume_after(Duration::ZERO);
    let key = |value: &str| key("ride", value);
    let abandoned = async |value: &str| -> anyhow::Result<LeaseOwner> {
        match leasing.acquire::<i64, _>(&pool, &key(value), "body").await? {
            Acquired::Owner(lease) => Ok(lease),
            Acquired::Replayed(_) => anyhow::bail!("it is new"),
        }
    };
    let lease = abandoned("resumed").await?;
    lease.step("charge", async |_| anyhow::Ok(1)).await?;
    lease.step_at_least_once("receipt", async |_| anyhow::Ok(1)).await?;
    lease.step_at_most_once("text", async |_| anyhow::Ok(1)).await?;
    // Errors that allow another try.
    let failing: anyhow::Result<i64> = lease.step("failing", async |_| anyhow::bail!("on purpose")).await;
    failing.expect_err("on purpose");
    let failing = lease.step_at_most_once("refused", async |step| -> anyhow::Result<i64> {
        Err(step.not_performed(anyhow::anyhow!("on purpose")))
    });
    failing.await.expect_err("on purpose");
    drop(lease);
    testing::lapse(&pool, &key("resumed")).await?;
    let work = async |lease: &Lease, _: String| lease.step("charge", async |_| anyhow::Ok(2)).await;
    leasing.resume_one(&pool, "ride", work).await?.expect("one");
    drop(abandoned("failing").await?);
    testing::lapse(&pool, &key("failing")).await?;
    let failing = async |_: &Lease, _: String| -> anyhow::Result<i64> { anyhow::bail!("on purpose") };
    for _attempt in 2..=3 {
        leasing.resume_one(&pool, "ride", failing).await.expect_err("on purpose");
    }
    assert!(leasing.resume_one(&pool, "ride", failing).await?.is_none(), "three attempts are all");

    let lease = abandoned("in doubt").await?;
    let failing: anyhow::Result<i64> = lease.step_at_most_once("failed", async |_| anyhow::bail!("on purpose")).await;
    failing.expect_err("on purpose");
    let again: anyhow::Result<i64> = lease.step_at_most_once("failed", async |_| anyhow::Ok(1)).await;
    again.expect_err("in doubt");
    let mut reached = false;
    {
        let dropped = lease.step_at_most_once("dropped", async |_| -> anyhow::Result<i64> {
            reached = true;
            std::future::pending().await
        });
        tokio::time::timeout(Duration::from_secs(1), dropped).await.expect_err("it never ends");
    }
    assert!(reached);

    let text = exported.render();
    for line in [
        r#"idempotency_steps_total{operation="ride",outcome="performed"} 3"#,
        r#"idempotency_steps_total{operation="ride",outcome="replayed"} 1"#,
        r#"idempotency_steps_total{operation="ride",outcome="in_doubt"} 3"#,
        r#"idempotency_resumed_total{operation="ride",outcome="performed"} 1"#,
        r#"idempotency_resumed_total{operation="ride",outcome="failed"} 1"#,
        r#"idempotency_resumed_total{operation="ride",outcome="exhausted"} 1"#,
        r#"idempotency_outcomes_total{mode="in_steps",operation="ride",outcome="performed"} 1"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    Ok(())
}
