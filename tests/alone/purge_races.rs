//! Janitors against callers whose records live for milliseconds: what is acknowledged and alive must never be purged.
//! 100 000 purges, or as many as PURGES says. It uses all there is of the machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pg_idempotency::lease::LeaseOptions;
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Idempotency, Janitor, Key, Outcome};
use rig::lease::AT_MOST_ONCE;
use sqlx::PgPool;

use crate::support::{create_effects, effects, leave_effect, pool_of};

const CALLERS: usize = 4;
const JANITORS: usize = 4;

fn key(operation: &str, value: impl ToString) -> Key {
    Key::new("tenant", operation, value.to_string()).expect("a valid key")
}

/// What one caller was told.
#[derive(Default)]
struct Told {
    performed: i64,
    kept: u64,
    first: u64,
}

/// Claims, take-overs, completions and marks of a few milliseconds on keys that all callers share, and now and then a
/// record and a lease that are to last.
async fn call(pool: &PgPool, caller: usize, done: &AtomicBool) -> Result<Told, Error> {
    let brief = Idempotency::new().retention(Duration::from_millis(2));
    let marks = MarkOptions::new(Duration::from_millis(1));
    let leasing = LeaseOptions::new(AT_MOST_ONCE);
    let mut told = Told::default();
    for n in 0_u64.. {
        if done.load(Ordering::Relaxed) {
            break;
        }
        match brief.run(pool, &key("brief", n % 8), "body", async |conn| leave_effect(conn, "brief").await).await {
            Ok(outcome) => told.performed += i64::from(!outcome.is_replayed()),
            Err(Error::OutlivedRetention | Error::InFlight { .. } | Error::Retryable(_)) => {}
            Err(error) => return Err(error),
        }
        let batch: Vec<Key> = (0..100).map(|mark| key("mark", (n * 7 + mark * 3) % 1000)).collect();
        let mut tx = pool.begin().await?;
        match marks.mark_many(&mut tx, &batch).await {
            Ok(marked) => {
                tx.commit().await?;
                told.first += marked.iter().filter(|marked| **marked == Marked::First).count() as u64;
            }
            Err(Error::InFlight { .. } | Error::Retryable(_)) => tx.rollback().await?,
            Err(error) => return Err(error),
        }
        if n % 10 == 0 {
            let own = format!("{caller}/{n}");
            let outcome =
                Idempotency::new().run(pool, &key("kept", &own), "body", async |_| Ok::<_, Error>(own.clone())).await?;
            assert_eq!(outcome, Outcome::Performed(own.clone()));
            let outcome =
                leasing.run(pool, &key("leased", &own), "body", async |_| Ok::<_, Error>(own.clone())).await?;
            assert_eq!(outcome, Outcome::Performed(own));
            told.kept += 2;
        }
    }
    Ok(told)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_live_record_is_lost(pool: PgPool) -> anyhow::Result<()> {
    let _turn = crate::turn().await;
    let purges: u64 = std::env::var("PURGES").map_or(Ok(100_000), |purges| purges.parse())?;
    let pool = pool_of(12, &pool.connect_options()).await;
    create_effects(&pool).await;
    let (done, purged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (pool, done) = (pool.clone(), done.clone());
            tokio::spawn(async move { call(&pool, caller, &done).await })
        })
        .collect();
    let janitors: Vec<_> = (0..JANITORS)
        .map(|_| {
            let (done, purged) = (done.clone(), purged.clone());
            let janitor = Janitor::new(pool.clone()).grace(Duration::ZERO);
            let janitor = janitor.pause(Duration::ZERO);
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    let swept = janitor.sweep_once(500).await?;
                    if purged.fetch_add(swept.rows(), Ordering::Relaxed) + swept.rows() >= purges {
                        done.store(true, Ordering::Relaxed);
                    }
                }
                Ok::<_, Error>(())
            })
        })
        .collect();
    let mut told = Told::default();
    for caller in callers {
        // If one fails the janitors must not go on for ever.
        let result = caller.await;
        done.store(
            result.as_ref().map_or(true, |result| result.is_err()) || done.load(Ordering::Relaxed),
            Ordering::Relaxed,
        );
        let one = result??;
        told.performed += one.performed;
        told.kept += one.kept;
        told.first += one.first;
    }
    for janitor in janitors {
        janitor.await??;
    }
    let purged = purged.load(Ordering::Relaxed);
    println!("{purged} purged beside {} performed, {} marked first, {} kept", told.performed, told.first, told.kept);
    assert!(purged >= purges);
    assert_eq!(effects(&pool).await, told.performed, "an effect for each acknowledged performance, and no other");
    let kept: i64 = sqlx::query_scalar(
        "select count(*) from idempotency.record where operation in ('kept', 'leased') and completed_at is not null",
    )
    .fetch_one(&pool)
    .await?;
    assert_eq!(kept as u64, told.kept, "what is to last is there");
    pool.close().await;
    Ok(())
}
