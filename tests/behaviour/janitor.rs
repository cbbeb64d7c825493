//! The sweep: what it deletes, what it must leave, and where it stops.

use std::time::Duration;

use pg_idempotency::{Error, Idempotency, Janitor};
use sqlx::{Executor as _, PgPool};

use crate::support::{Gate, create_effects, effects, expire_in, key, leave_effect, once};

/// `count` records of this mode and state, that ended a minute ago or will end in one.
async fn fill(pool: &PgPool, mode: &str, completed: bool, lease: Option<&str>, expired: bool, count: i32) {
    sqlx::query(
        "
        insert into idempotency.record (mode, scope, operation, key, fingerprint, token, lease_until, completed_at, expires_at)
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

async fn left(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from idempotency.record").fetch_one(pool).await.expect("a count")
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn deletes_what_is_expired_and_counts_it_by_kind(pool: PgPool) -> anyhow::Result<()> {
    for expired in [true, false] {
        fill(&pool, "transaction", true, None, expired, 5).await;
        fill(&pool, "transaction", false, None, expired, 3).await;
        fill(&pool, "transaction", false, Some("-infinity"), expired, 1).await;
        fill(&pool, "at_least_once", false, Some("-1 min"), expired, 2).await;
        fill(&pool, "at_most_once", false, Some("1 min"), expired, 7).await;
        fill(&pool, "mark", true, None, expired, 4).await;
    }
    let swept = Janitor::new(pool.clone()).sweep_once(u64::MAX).await?;
    assert_eq!((swept.completed, swept.unfinished, swept.marks), (5, 6, 4));
    assert_eq!((swept.rows(), swept.batches, swept.limited), (15, 1, false));
    assert_eq!(left(&pool).await, 22 + 7, "what is not expired, and what is under a live lease");
    assert_eq!(Janitor::new(pool.clone()).sweep_once(u64::MAX).await?.rows(), 0);
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn works_in_batches_and_stops_at_its_limit(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool, "transaction", true, None, true, 3500).await;
    let janitor = Janitor::new(pool.clone());
    let swept = janitor.sweep_once(1200).await?;
    assert_eq!((swept.rows(), swept.batches, swept.limited), (1200, 2, true));
    let swept = janitor.sweep_once(u64::MAX).await?;
    assert_eq!((swept.rows(), swept.batches, swept.limited), (2300, 3, false));
    assert!(janitor.sweep_once(0).await?.limited);
    Ok(())
}

/// The plans that deleted 1989 rows for a limit of 10.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn never_deletes_more_than_its_limit_whatever_the_plan(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool, "transaction", true, None, true, 2000).await;
    for settings in [
        "set enable_hashjoin = off; set enable_mergejoin = off; set enable_material = off; set enable_hashagg = off",
        "set enable_nestloop = off; set enable_indexscan = off; set enable_bitmapscan = off",
        "set enable_tidscan = off; set enable_seqscan = off",
    ] {
        let pool = sqlx::postgres::PgPoolOptions::new()
            .after_connect(move |conn, _| Box::pin(async move { conn.execute(settings).await.map(drop) }))
            .connect_with((*pool.connect_options()).clone())
            .await?;
        assert_eq!(Janitor::new(pool.clone()).sweep_once(10).await?.rows(), 10, "{settings}");
    }
    assert_eq!(left(&pool).await, 2000 - 30);
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn skips_a_record_that_is_being_taken_over(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    let _ = once(&pool, &key("b"), "body").await?;
    expire_in(&pool, &key("a"), "0ms").await;
    expire_in(&pool, &key("b"), "0ms").await;
    let gate = Gate::new();
    let taker = tokio::spawn({
        let (pool, gate) = (pool.clone(), gate.clone());
        async move {
            Idempotency::new()
                .run(&pool, &key("a"), "body", async |conn| {
                    gate.pass().await;
                    leave_effect(conn, "taken over").await
                })
                .await
        }
    });
    gate.reached().await;
    let janitor = Janitor::new(pool.clone());
    let swept =
        tokio::time::timeout(crate::support::PATIENCE, janitor.sweep_once(10)).await.expect("it does not wait")?;
    assert_eq!(swept.rows(), 1, "only the other one");
    gate.open();
    let _ = taker.await??;
    assert_eq!(Janitor::new(pool.clone()).sweep_once(10).await?.rows(), 0);
    assert!(once(&pool, &key("a"), "body").await?.is_replayed());
    assert_eq!(effects(&pool).await, 3);
    Ok(())
}

/// Four janitors against callers whose records live a millisecond: whoever is acknowledged finds his record as long as it
/// lives, and the counts of effects and acknowledgements agree.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn races_with_claims_and_take_overs_lose_nothing(
    _: sqlx::postgres::PgPoolOptions,
    options: sqlx::postgres::PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = crate::support::wide_pool(&options, 12).await;
    create_effects(&pool).await;
    let short = Idempotency::new().with_retention(Duration::from_millis(5))?;
    let callers: Vec<_> = (0..4)
        .map(|caller| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let mut performed = 0_i64;
                for n in 0..300 {
                    // Four keys, so that callers meet each other, and expiry, and the janitors.
                    let key = key(&format!("{}", (n + caller) % 4));
                    match short.run(&pool, &key, "body", async |conn| leave_effect(conn, "effect").await).await {
                        Ok(outcome) => performed += i64::from(!outcome.is_replayed()),
                        Err(Error::OutlivedRetention | Error::InFlight { .. } | Error::Retryable(_)) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
                performed
            })
        })
        .collect();
    let janitors: Vec<_> = (0..4)
        .map(|_| {
            let janitor = Janitor::new(pool.clone());
            tokio::spawn(async move {
                loop {
                    janitor.sweep_once(100).await.expect("a sweep");
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    let mut performed = 0;
    for caller in callers {
        performed += caller.await?;
    }
    janitors.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(effects(&pool).await, performed, "an effect for each acknowledged performance, and no other");
    assert!(performed > 4, "records did expire");
    pool.close().await;
    Ok(())
}
