//! Marks: the window, places in a batch, limits and plans. The interleavings have single marks and batches in flight.

use std::time::Duration;

use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::testing::expire;
use pg_idempotency::{Error, Key, Misuse, OnDuplicate};
use rig::fixture::Fixture;
use rig::lease::IN_STEPS;
use sqlx::PgPool;

use crate::support::{connect, key, pool_of, setting};

const WINDOW: Duration = Duration::from_secs(300);
use Marked::{Duplicate, First};

fn keys(values: impl IntoIterator<Item = impl ToString>) -> Vec<Key> {
    values.into_iter().map(|value| key(&value.to_string())).collect()
}

async fn marked(pool: &PgPool, keys: &[Key]) -> Result<Vec<Marked>, Error> {
    // A busy machine may take longer than the default of five seconds.
    let marking = MarkOptions::new(WINDOW).on_duplicate(OnDuplicate::Wait(Duration::from_secs(60)));
    let mut tx = pool.begin().await?;
    let marked = marking.mark_many(&mut tx, keys).await?;
    tx.commit().await?;
    Ok(marked)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_place_gets_its_answer(pool: PgPool) -> anyhow::Result<()> {
    let marking = MarkOptions::new(WINDOW);
    let marked = async |values: &[&str]| -> Result<Vec<Marked>, Error> {
        let mut tx = pool.begin().await?;
        let marked = marking.mark_many(&mut tx, &keys(values)).await?;
        tx.commit().await?;
        Ok(marked)
    };
    assert_eq!(marked(&["c", "a", "b"]).await?, [First; 3]);
    let exact = "select bool_and(expires_at - completed_at = interval '300 s') from idempotency.record";
    assert!(sqlx::query_scalar::<_, bool>(exact).fetch_one(&pool).await?);
    expire(&pool, &key("c")).await?;
    assert_eq!(
        marked(&["d", "a", "c", "d", "b", "c", "c"]).await?,
        [First, Duplicate, First, Duplicate, Duplicate, Duplicate, Duplicate]
    );
    assert_eq!(marked(&[]).await?, []);
    let mut tx = pool.begin().await?;
    assert_eq!(marking.mark(&mut tx, &key("f")).await?, First);
    assert_eq!(marking.mark_many(&mut tx, &keys(["f", "g"])).await?, [Duplicate, First], "in one transaction");
    assert_eq!(setting(&mut tx, "lock_timeout").await, "0");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn more_than_a_hundred_different_keys_are_refused_and_none_is_marked(pool: PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    let error = MarkOptions::new(WINDOW).mark_many(&mut tx, &keys(0..101)).await;
    assert!(matches!(error, Err(Error::Misuse(Misuse::TooManyKeys { keys: 101, .. }))), "{error:?}");
    let mut twice = keys(0..100);
    twice.extend(keys(0..100));
    assert_eq!(MarkOptions::new(WINDOW).mark_many(&mut tx, &twice).await?[..100], [First; 100]);
    Ok(())
}

/// A key of another mode, or a key in flight, fails the batch. A caller that commits all the same has lost no key.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_batch_that_fails_has_marked_nothing(pool: PgPool) -> anyhow::Result<()> {
    Fixture::completed(&key("other mode"), "body", &1)?.write(&pool).await?;
    // Nothing of an operation in steps is left for the mark that takes its place.
    let in_steps = Fixture::lapsed(&key("expired"), "body", IN_STEPS)?.with_stored_request("body");
    in_steps.with_step("ride", &1).with_step_in_doubt("text").expired().write(&pool).await?;
    let mut owner = pool.begin().await?;
    assert_eq!(mark(&mut owner, &key("in flight"), WINDOW).await?, First);
    let rejecting = MarkOptions::new(WINDOW).on_duplicate(OnDuplicate::Reject);
    for obstacle in ["other mode", "in flight"] {
        let mut tx = pool.begin().await?;
        let error = rejecting.mark_many(&mut tx, &keys(["a", "expired", obstacle, "z"])).await;
        assert!(matches!(error, Err(Error::OtherMode { .. } | Error::InFlight { .. })), "{obstacle}: {error:?}");
        tx.commit().await?;
    }
    owner.rollback().await?;
    assert_eq!(marked(&pool, &keys(["a", "expired", "z"])).await?, [First; 3]);
    let alone = mark(&mut *pool.begin().await?, &key("other mode"), WINDOW).await;
    assert!(matches!(alone, Err(Error::OtherMode { .. })), "{alone:?}");
    Ok(())
}

/// The planner must not scan the table for a batch, whatever it believes of it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_batch_probes_the_index_also_without_statistics(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    sqlx::query(
        "insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
         select 'mark', 'tenant', 'operation', n::text, n, now(), now() + interval '1 h' from generate_series(1, 50000) as n",
    )
    .execute(&mut conn)
    .await?;
    let before: i64 = sqlx::query_scalar(
        "select coalesce(sum(seq_tup_read), 0)::int8 from pg_stat_xact_user_tables where relname = 'record'",
    )
    .fetch_one(&mut conn)
    .await?;
    let mut tx = sqlx::Connection::begin(&mut conn).await?;
    let result = MarkOptions::new(WINDOW).mark_many(&mut tx, &keys((1..=100).map(|n| n * 1000))).await?;
    assert_eq!(result.iter().filter(|marked| **marked == Duplicate).count(), 50);
    let read: i64 = sqlx::query_scalar(
        "select coalesce(sum(seq_tup_read), 0)::int8 from pg_stat_xact_user_tables where relname = 'record'",
    )
    .fetch_one(&mut *tx)
    .await?;
    assert!(read - before < 50_000, "{} rows were read one after the other", read - before);
    tx.commit().await?;
    Ok(())
}

/// The wait of a batch is bounded like a single one's, and ends with the transaction usable.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_batchs_wait_ends_at_its_limit_with_the_transaction_usable(pool: PgPool) -> anyhow::Result<()> {
    let mut owner = pool.begin().await?;
    let _ = MarkOptions::new(WINDOW).mark_many(&mut owner, &keys(["b", "d"])).await?;
    let mut tx = pool.begin().await?;
    let waiting = MarkOptions::new(WINDOW).on_duplicate(OnDuplicate::Wait(Duration::from_millis(100)));
    let started = std::time::Instant::now();
    let error = waiting.mark_many(&mut tx, &keys(["a", "b", "c", "d"])).await;
    assert!(matches!(error, Err(Error::InFlight { .. })), "{error:?}");
    assert!(started.elapsed() >= Duration::from_millis(100));
    assert_eq!(setting(&mut tx, "lock_timeout").await, "0");
    owner.rollback().await?;
    assert_eq!(waiting.mark_many(&mut tx, &keys(["a", "b", "c", "d"])).await?, [First; 4]);
    Ok(())
}

/// On a small table that was analyzed, where an update without an order would go through the heap. A third of the keys
/// is new, a third expired and a third marked.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn batches_and_single_marks_of_new_expired_and_taken_keys_do_not_deadlock(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(8, &pool.connect_options()).await;
    for round in 0..12 {
        // In the heap in the opposite order of the keys.
        sqlx::raw_sql(
            "truncate idempotency.record;
             insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
             select 'mark', 'tenant', 'operation', lpad(n::text, 4, '0'), n, now(), now() + case n % 3 when 1 then interval '-30 min' else interval '30 min' end
             from generate_series(120, 1, -1) as n where n % 3 > 0;
             analyze idempotency.record",
        )
        .execute(&pool)
        .await?;
        let consumers: Vec<_> = (0..8_usize)
            .map(|consumer| {
                let (pool, size) = (pool.clone(), if consumer % 2 == 0 { 95 } else { 40 });
                tokio::spawn(async move {
                    let input = keys((1..=size).map(|n| format!("{:04}", n + consumer)));
                    let mut result = Vec::new();
                    if consumer % 4 == 3 {
                        let one = MarkOptions::new(WINDOW).on_duplicate(OnDuplicate::Wait(Duration::from_secs(60)));
                        let mut tx = pool.begin().await?;
                        for key in &input {
                            result.push(one.mark(&mut tx, key).await?);
                        }
                        tx.commit().await?;
                    } else {
                        result = marked(&pool, &input).await?;
                    }
                    Ok::<_, Error>(result.into_iter().filter(|marked| *marked == First).count())
                })
            })
            .collect();
        let mut firsts = 0;
        for consumer in consumers {
            firsts += consumer.await??;
        }
        let free = (1..=101).filter(|n| n % 3 != 2).count();
        assert_eq!(firsts, free, "round {round}: the new and the expired keys of 1 to 101, each once");
    }
    pool.close().await;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn autocommit_is_refused_before_anything_is_marked(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    let error = mark(&mut conn, &key("a"), WINDOW).await;
    assert!(matches!(error, Err(Error::Misuse(Misuse::NotInTransaction))), "{error:?}");
    let error = MarkOptions::new(WINDOW).mark_many(&mut conn, &[key("a")]).await;
    assert!(matches!(error, Err(Error::Misuse(Misuse::NotInTransaction))), "{error:?}");
    assert_eq!(marked(&pool, &keys(["a"])).await?, [First]);
    Ok(())
}
