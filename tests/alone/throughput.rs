//! One ratio that is a promise: replays of one key do not queue behind each other.

use std::time::{Duration, Instant};

use pg_idempotency::ensure_idempotent;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Executor as _, PgPool};

use crate::support::{create_effects, key, leave_effect, once, wide_pool};

const CALLERS: usize = 16;
const CALLS: usize = 10;

async fn plain_insert(pool: PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    leave_effect(&mut tx, "plain").await?;
    tx.execute("select pg_sleep(0.02)").await?;
    tx.commit().await?;
    Ok(())
}

async fn replay(pool: PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    let outcome = ensure_idempotent(&mut tx, &key("hot"), "body", async |conn| leave_effect(conn, "no").await).await?;
    assert!(outcome.is_replayed());
    tx.execute("select pg_sleep(0.02)").await?;
    tx.commit().await?;
    Ok(())
}

async fn elapsed<F>(pool: &PgPool, call: fn(PgPool) -> F) -> anyhow::Result<Duration>
where
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let started = Instant::now();
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move {
                for _ in 0..CALLS {
                    call(pool.clone()).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    Ok(started.elapsed())
}

/// In transactions of 20 ms, at about a plain insert's throughput; an advisory lock that is awaited gives 0.06. The bound is
/// between the two, because a replay takes more of a busy machine's time than an insert does.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn replays_of_one_key_do_not_queue(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let _turn = crate::turn().await;
    let pool = wide_pool(&options, CALLERS as u32).await;
    create_effects(&pool).await;
    let _ = once(&pool, &key("hot"), "body").await?;
    let mut ratios = Vec::new();
    for _ in 0..9 {
        let plain = elapsed(&pool, plain_insert).await?;
        let replayed = elapsed(&pool, replay).await?;
        ratios.push(plain.as_secs_f64() / replayed.as_secs_f64());
    }
    ratios.sort_by(f64::total_cmp);
    let median = ratios[4];
    println!("replays run at {median:.2} of a plain insert's throughput (median of {ratios:.2?})");
    assert!(median >= 0.3, "{ratios:?}");
    pool.close().await;
    Ok(())
}
