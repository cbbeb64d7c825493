//! The sweep: which records it deletes, which records it leaves, and when it ends.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use pg_idempotency::Janitor;
use pg_idempotency::testing::age;
use rig::fixture::Fixture;
use rig::gate::PATIENCE;
use sqlx::{Executor as _, PgPool};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::support::{janitor, key, options, pool_of, records};

/// Inserts `count` records of this mode and state, which expired a minute ago or will expire in a minute.
async fn fill(pool: &PgPool, mode: &str, completed: bool, lease: Option<&str>, expired: bool, count: i32) {
    sqlx::query(
        "
        insert into idempotency.record (mode, scope, operation, value, fingerprint, token, lease_until, completed_at, expires_at)
        select $1, 's', concat_ws(' ', $1, $2, $3, $4), n, case when $1 <> 'mark' then '\\x0100'::bytea end, n,
            case $3 when '-infinity' then '-infinity' else now() + $3::interval end,
            case when $2 then now() end,
            now() + case when $4 then interval '-1 min' else interval '1 min' end
        from generate_series(1, $5) as n
        ",
    )
    .bind(mode)
    .bind(completed)
    .bind(lease)
    .bind(expired)
    .bind(count)
    .execute(pool)
    .await
    .expect("records");
}

/// Runs until it is told to stop.
fn run(janitor: Janitor) -> (oneshot::Sender<()>, JoinHandle<()>) {
    let (stop, stopped) = oneshot::channel();
    (stop, tokio::spawn(janitor.run(async { drop(stopped.await) })))
}

fn rows(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).expect("not zero")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_deletes_expired_records_and_counts_them_by_kind(pool: PgPool) -> anyhow::Result<()> {
    for expired in [true, false] {
        fill(&pool, "transaction", true, None, expired, 5).await;
        fill(&pool, "transaction", false, None, expired, 3).await;
        fill(&pool, "transaction", false, Some("-infinity"), expired, 1).await;
        fill(&pool, "at_least_once", false, Some("-1 min"), expired, 2).await;
        fill(&pool, "at_most_once", false, Some("1 min"), expired, 7).await;
        fill(&pool, "at_most_once", false, Some("-1 min"), expired, 2).await;
        fill(&pool, "in_steps", false, Some("-1 min"), expired, 1).await;
        fill(&pool, "mark", true, None, expired, 4).await;
    }
    let in_doubt =
        r#"update idempotency.record set steps = '{"text": {"begun": "2026-11-26"}}' where mode = 'in_steps'"#;
    sqlx::query(in_doubt).execute(&pool).await?;
    let swept = janitor(&pool).sweep_once(u64::MAX).await?;
    assert_eq!((swept.completed, swept.unfinished, swept.indeterminate, swept.marks), (5, 3, 6, 4));
    assert_eq!((swept.rows(), swept.batches, swept.limited), (18, 1, false));
    assert_eq!(records(&pool).await, 25 + 7, "what is not expired, and what is under a live lease");
    assert_eq!(janitor(&pool).sweep_once(u64::MAX).await?.rows(), 0);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_works_in_batches_and_stops_at_its_limit(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool, "transaction", true, None, true, 3500).await;
    let janitor = janitor(&pool);
    let swept = janitor.sweep_once(1200).await?;
    assert_eq!((swept.rows(), swept.batches, swept.limited), (1200, 2, true));
    assert!(swept.oldest_after.is_some_and(|age| age >= Duration::from_secs(60)), "the oldest that is left: {swept:?}");
    let swept = janitor.sweep_once(u64::MAX).await?;
    assert_eq!((swept.rows(), swept.batches, swept.limited, swept.oldest_after), (2300, 3, false, None));
    assert!(!janitor.sweep_once(0).await?.limited, "nothing is left");
    Ok(())
}

/// With these plans an earlier statement deleted 1989 rows for a limit of 10.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_never_deletes_more_than_its_limit_under_any_plan(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool, "transaction", true, None, true, 2000).await;
    for settings in [
        "set enable_hashjoin = off; set enable_mergejoin = off; set enable_material = off; set enable_hashagg = off",
        "set enable_nestloop = off; set enable_indexscan = off; set enable_bitmapscan = off",
        "set enable_tidscan = off; set enable_seqscan = off",
    ] {
        let pool = sqlx::postgres::PgPoolOptions::new()
            .after_connect(move |conn, _| Box::pin(async move { conn.execute(settings).await.map(drop) }))
            .connect_with(options(&pool))
            .await?;
        assert_eq!(janitor(&pool).sweep_once(10).await?.rows(), 10, "{settings}");
    }
    assert_eq!(records(&pool).await, 2000 - 30);
    Ok(())
}

/// A batch begins at the very moment at which the batch before ended, or at the beginning if a client cannot read that
/// moment.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn batches_leave_nothing_out_between_them(pool: PgPool) -> anyhow::Result<()> {
    let janitor = janitor(&pool).batch_size(rows(2)).pause(Duration::ZERO);
    fill(&pool, "transaction", true, None, true, 5).await;
    fill(&pool, "mark", true, None, true, 3).await;
    pool.execute("update idempotency.record set expires_at = '-infinity' where mode = 'mark'").await?;
    let mut locker = pool.begin().await?;
    locker.execute("select from idempotency.record where token = 1 and mode = 'mark' for update").await?;
    assert_eq!(janitor.sweep_once(u64::MAX).await?.rows(), 7);
    locker.rollback().await?;
    assert_eq!(janitor.sweep_once(u64::MAX).await?.rows(), 1, "what was locked is the next pass's");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_interval_or_a_shutdown_ends_a_sweep_between_two_batches(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool, "transaction", true, None, true, 5000).await;
    // Each sweep would take hours.
    let janitor = janitor(&pool).interval(Duration::from_secs(1)).batch_size(rows(10)).pause(Duration::from_secs(3600));
    let (stop, running) = run(janitor);
    crate::support::until(&pool, "select count(*) <= 4970 from idempotency.record").await;
    stop.send(()).expect("it listens");
    tokio::time::timeout(PATIENCE, running).await.expect("it stops")?;
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn a_janitor_goes_on_after_errors(pool: PgPool) -> anyhow::Result<()> {
    let janitor = janitor(&pool).interval(Duration::from_secs(1));
    let (stop, running) = run(janitor);
    // At first the table is missing. Later the sweeps are killed.
    crate::support::until(&pool, "select xact_rollback > 0 from pg_stat_database where datname = current_database()")
        .await;
    pg_idempotency::migrate(&pool).await?;
    fill(&pool, "transaction", true, None, true, 500).await;
    crate::support::until(&pool, "select count(*) = 0 from idempotency.record").await;
    let mut killer = crate::support::connect(&pool).await;
    killer
        .execute(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()",
        )
        .await?;
    fill(&pool, "transaction", true, None, true, 500).await;
    crate::support::until(&pool, "select count(*) = 0 from idempotency.record").await;
    stop.send(()).expect("it listens");
    running.await?;
    Ok(())
}

/// A time-out halves the batch until it fits.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_batch_that_takes_too_long_is_halved(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool, "transaction", true, None, true, 400).await;
    // Deleting a row takes a millisecond, and the time-out of a statement is 100 ms.
    pool.execute(
        "create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.001); return old; end $$;
         create trigger slow before delete on idempotency.record for each row execute function slow()",
    )
    .await?;
    let hurried = pool_of(2, &options(&pool).options([("statement_timeout", "100ms")])).await;
    let janitor = janitor(&hurried).interval(Duration::from_secs(1));
    let (stop, running) = run(janitor);
    crate::support::until(&pool, "select count(*) = 0 from idempotency.record").await;
    stop.send(()).expect("it listens");
    running.await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_keeps_its_pace(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool, "transaction", true, None, true, 300).await;
    let pause = Duration::from_millis(200);
    let paced = janitor(&pool).batch_size(rows(100)).pause(pause);
    let started = Instant::now();
    let swept = paced.sweep_once(200).await?;
    assert_eq!((swept.rows(), swept.limited), (200, true));
    assert!(started.elapsed() >= pause, "a pause between the batches: {:?}", started.elapsed());
    Ok(())
}

/// A duplicate that asked before the record expired may still wait, and the record is its answer.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_has_just_expired_is_left_alone_for_the_grace(pool: PgPool) -> anyhow::Result<()> {
    for value in ["fresh", "old"] {
        Fixture::marked(&key(value)).expired().write(&pool).await?;
    }
    age(&pool, &key("old"), Duration::from_secs(120)).await?;
    let janitor = Janitor::new(pool.clone());
    assert_eq!(janitor.sweep_once(10).await?.marks, 1);
    let left: Vec<String> = sqlx::query_scalar("select value from idempotency.record").fetch_all(&pool).await?;
    assert_eq!(left, ["fresh"]);
    assert_eq!(janitor.grace(Duration::ZERO).sweep_once(10).await?.marks, 1);
    Ok(())
}
