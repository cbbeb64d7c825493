//! What a sweep is worth and what it costs, on a table of expired records:
//!
//! - **paced**, as it is by default: first calls a second of 8 clients, in slices with the sweep and slices without, in turns;
//! - **unpaced**, in batches of 10 000: rows deleted a second.
//!
//! `PG_FSYNC=on cargo bench --bench janitor`. Five million records take some minutes to fill in; `ROWS=50000` is a smoke
//! run, whose figures say nothing.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pg_idempotency::{Error, Janitor, Key, ensure_idempotent, migrate};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

const ROWS: u64 = 5_000_000;
const CLIENTS: usize = 8;
/// With and without the sweep each; an odd number, for a median.
const PAIRS: usize = 9;
const SLICE: Duration = Duration::from_secs(3);
/// What the default pace cannot exceed: 1000 rows in each 50 ms.
const PACED_ROWS_PER_SECOND: f64 = 20_000.0;
const RESPONSE_BYTES: usize = 300;

const TARGET_RATIO: f64 = 0.9;
const TARGET_RATE: f64 = 100_000.0;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let rows = std::env::var("ROWS").map_or(Ok(ROWS), |rows| rows.parse())?;
    let url = std::env::var("DATABASE_URL")?;
    let pool = PgPoolOptions::new().max_connections(CLIENTS as u32 + 1).connect(&url).await?;
    migrate(&mut *pool.acquire().await?).await?;
    let in_use: bool = sqlx::query_scalar("select exists (select from idempotency.record)").fetch_one(&pool).await?;
    anyhow::ensure!(!in_use, "DATABASE_URL names a database with records in it");

    let started = Instant::now();
    fill(&pool, rows).await?;
    settle(&pool).await?;
    println!("{rows} expired records, filled in {:.0?}\n", started.elapsed());

    let paced = paced(&pool, rows).await?;
    settle(&pool).await?;
    let unpaced = unpaced(&pool).await?;

    println!("{:<58} {:>9} {:>9}", "", "measured", "target");
    line("first calls a second without the sweep", format!("{:.0}", paced.without), "");
    line("first calls a second with it, 1000 rows and 50 ms", format!("{:.0}", paced.with), "");
    line("  ratio of the two", format!("{:.2}", paced.ratio), format!("≥ {TARGET_RATIO}"));
    line("  rows deleted a second meanwhile", format!("{:.0}", paced.swept), "");
    line("rows deleted a second, unpaced, batches of 10 000", format!("{unpaced:.0}"), format!("≥ {TARGET_RATE}"));
    Ok(())
}

fn line(what: &str, measured: impl Display, target: impl Display) {
    println!("{what:<58} {measured:>9} {target:>9}");
}

/// Records as they are a day later: in the order of their time, a mark among ten, one in a hundred left unfinished by a
/// lease that has lapsed, and the keys random, as UUIDs are.
async fn fill(pool: &PgPool, rows: u64) -> anyhow::Result<()> {
    sqlx::query(
        "
        insert into idempotency.record (
            mode, scope, operation, key, fingerprint, token, claimed_at, lease_until, completed_at, expires_at,
            response_status, response_body
        )
        select
            mode, 'account:' || n % 5000, 'POST /payments', gen_random_uuid(),
            case when mode <> 'mark' then '\\x01'::bytea || sha256(n::text::bytea) end,
            n, at, case when mode = 'at_least_once' then at + interval '1 min' end,
            case when mode <> 'at_least_once' then at end, at + interval '1 day',
            case when mode = 'transaction' then 201 end,
            case when mode = 'transaction' then convert_to(rpad(n::text, $2::int4, 'response '), 'UTF8') end
        from (
            select
                n, now() - interval '2 days' + n * (interval '12 hours' / $1) as at,
                case when n % 10 = 0 then 'mark' when n % 100 = 1 then 'at_least_once' else 'transaction' end as mode
            from generate_series(1, $1::int8) as n
        ) as record
        ",
    )
    .bind(i64::try_from(rows)?)
    .bind(RESPONSE_BYTES as i32)
    .execute(pool)
    .await?;
    Ok(())
}

/// What autovacuum and the checkpointer would do in time, so that neither falls into one slice and not into another.
async fn settle(pool: &PgPool) -> anyhow::Result<()> {
    sqlx::query("vacuum (analyze) idempotency.record").execute(pool).await?;
    sqlx::query("checkpoint").execute(pool).await?;
    Ok(())
}

/// Medians; the ratio is that of each pair.
struct Paced {
    without: f64,
    with: f64,
    ratio: f64,
    swept: f64,
}

async fn paced(pool: &PgPool, rows: u64) -> anyhow::Result<Paced> {
    // No slice may run out of rows, and half of them are left for the other measurement.
    let affordable = rows as f64 / 2.0 / (PAIRS + 1) as f64 / PACED_ROWS_PER_SECOND;
    let slice = SLICE.min(Duration::from_secs_f64(affordable));
    let janitor = Janitor::new(pool.clone());
    let (mut without, mut with, mut ratios, mut swept) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // The first pair warms connections and statements.
    for pair in 0..=PAIRS {
        let mut rates = [0.0; 2];
        // Who is first in a pair takes turns too.
        for sweeping in [pair % 2 == 0, pair % 2 != 0] {
            if !sweeping {
                rates[0] = first_calls_per_second(pool, slice).await?;
                continue;
            }
            let sweep = janitor.sweep_until(u64::MAX, tokio::time::sleep(slice), |_| {});
            let (rate, deleted) = tokio::join!(first_calls_per_second(pool, slice), sweep);
            rates[1] = rate?;
            let deleted = deleted?;
            anyhow::ensure!(deleted.limited, "the sweep ran out of rows");
            swept.push(deleted.rows() as f64 / deleted.duration.as_secs_f64());
        }
        if pair > 0 {
            without.push(rates[0]);
            with.push(rates[1]);
            ratios.push(rates[1] / rates[0]);
        }
    }
    Ok(Paced { without: median(without), with: median(with), ratio: median(ratios), swept: median(swept) })
}

async fn unpaced(pool: &PgPool) -> anyhow::Result<f64> {
    let janitor = Janitor::new(pool.clone()).with_batch_size(10_000)?.with_pause(Duration::ZERO);
    let swept = janitor.sweep_once(u64::MAX).await?;
    Ok(swept.rows() as f64 / swept.duration.as_secs_f64())
}

/// No two calls of a run have the same key.
static CALLS: AtomicU64 = AtomicU64::new(0);

async fn first_calls_per_second(pool: &PgPool, slice: Duration) -> anyhow::Result<f64> {
    let started = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let mut conn = pool.acquire().await?;
                let mut calls = 0;
                while started.elapsed() < slice {
                    let value = format!("{client}-{:016}", CALLS.fetch_add(1, Ordering::Relaxed));
                    let key = Key::new(format!("account:{client}"), "POST /payments", value)?;
                    let outcome = ensure_idempotent(&mut conn, &key, "100.00 EUR", async |_| -> Result<_, Error> {
                        Ok("r".repeat(RESPONSE_BYTES))
                    })
                    .await?;
                    anyhow::ensure!(!outcome.is_replayed(), "every key is new");
                    calls += 1;
                }
                anyhow::Ok(calls)
            })
        })
        .collect();
    let mut calls = 0;
    for client in clients {
        calls += client.await??;
    }
    Ok(f64::from(calls) / started.elapsed().as_secs_f64())
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
