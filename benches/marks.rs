//! Marks one by one against marks in batches: keys a second at 8 clients, each key new, a transaction for each call.
//!
//! `PG_FSYNC=on cargo bench --bench marks`. The cases take turns in one run, so that a machine that drifts favours none; the
//! ratios of the medians are what to look at.

use std::time::{Duration, Instant};

use pg_idempotency::dedup::{Marked, mark_many};
use pg_idempotency::{Key, dedup, migrate};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

const CLIENTS: usize = 8;
const ROUNDS: usize = 5;
const SLICE: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(3600);
/// Keys in one call; one is `mark`, the others are `mark_many`.
const SIZES: [usize; 4] = [1, 10, 100, 1000];

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPoolOptions::new().max_connections(CLIENTS as u32).connect(&std::env::var("DATABASE_URL")?).await?;
    migrate(&mut *pool.acquire().await?).await?;
    let mut rates = SIZES.map(|_| Vec::new());
    for round in 0..=ROUNDS {
        for (case, size) in SIZES.into_iter().enumerate() {
            let rate = keys_per_second(&pool, round, size).await?;
            // The first round warms connections and statements.
            if round > 0 {
                rates[case].push(rate);
            }
        }
    }
    let medians = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[ROUNDS / 2]
    });
    for (size, median) in SIZES.iter().zip(medians) {
        println!("{size:>5} keys a call: {median:>8.0} keys/s, {:.1} times one by one", median / medians[0]);
    }
    Ok(())
}

async fn keys_per_second(pool: &PgPool, round: usize, size: usize) -> anyhow::Result<f64> {
    let started = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let mut keys = 0;
                while started.elapsed() < SLICE {
                    let batch = (0..size)
                        .map(|n| Key::new("bench", "marks", format!("{round}/{size}/{client}/{}", keys + n)))
                        .collect::<Result<Vec<_>, _>>()?;
                    let mut tx = pool.begin().await?;
                    let marked = match &batch[..] {
                        [one] => vec![dedup::mark(&mut tx, one, WINDOW).await?],
                        many => mark_many(&mut tx, many, WINDOW).await?,
                    };
                    tx.commit().await?;
                    anyhow::ensure!(marked.iter().all(|marked| *marked == Marked::First), "every key is new");
                    keys += size;
                }
                anyhow::Ok(keys)
            })
        })
        .collect();
    let mut keys = 0;
    for client in clients {
        keys += client.await??;
    }
    Ok(keys as f64 / started.elapsed().as_secs_f64())
}
