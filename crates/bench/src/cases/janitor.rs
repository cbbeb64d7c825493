//! How fast a sweep is, and what it costs the callers beside it.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use pg_idempotency::Janitor;

use super::records::{settle, store};
use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::response;
use crate::measure::{Sample, in_turns, sample, team};
use crate::results::{MAIN, Table};

pub(crate) const NAME: &str = "janitor";

pub(crate) const WITHOUT: &str = "without the sweep";
pub(crate) const BESIDE: &str = "beside the sweep, paced";
pub(crate) const SWEEPS: &str = "Sweeps";
pub(crate) const UNPACED: &str = "unpaced";
/// The default pace cannot exceed this rate.
const PACED_ROWS_PER_SECOND: f64 = 20_000.0;
const LARGE: NonZeroU32 = NonZeroU32::new(10_000).unwrap();

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let setting = bench.socket();
    bench.clear().await?;
    let mut conn = bench.plain().connect(None).await?;
    store(&mut conn, bench.scale.expired, -2).await?;

    // No turn may run out of rows, and half of them are left for the other measurement.
    let affordable = bench.scale.expired as f64 / 2.0 / (bench.scale.rounds + 1) as f64 / PACED_ROWS_PER_SECOND;
    let slice = Duration::from_secs_f64(affordable).min(bench.scale.slice * 4);
    let pool = setting.pool(2).await?;
    let janitor = Janitor::new(pool.clone()).grace(Duration::ZERO);
    let mut team = team(setting, 8, None).await?;
    let way = library::first_call(response(300));
    let calls = in_turns(bench.scale.rounds, [WITHOUT, BESIDE], async |beside| {
        if beside == 0 {
            return sample(&mut team, &way, slice).await;
        }
        // About three quarters of what the pace allows, so that the sweep ends shortly before or after the slice.
        let limit = (slice.as_secs_f64() * PACED_ROWS_PER_SECOND * 0.75) as u64;
        let (sample, swept) = tokio::join!(sample(&mut team, &way, slice), sweep(&janitor, limit));
        swept.and(sample)
    })
    .await?;

    settle(&mut conn).await?;
    let janitor = Janitor::new(pool).grace(Duration::ZERO).batch_size(LARGE).pause(Duration::ZERO);
    // A sixteenth of the rows that are left, in each round.
    let rows = bench.scale.expired / 32;
    let sweeps = in_turns(bench.scale.rounds, [UNPACED], async |_| sweep(&janitor, rows).await).await?;
    bench.clear().await?;
    Ok(vec![
        Table::new(MAIN, setting.column(), "first calls", calls),
        Table::new(SWEEPS, setting.column(), "rows", sweeps),
    ])
}

async fn sweep(janitor: &Janitor, limit: u64) -> anyhow::Result<Sample> {
    let started = Instant::now();
    let swept = janitor.sweep_once(limit).await?;
    anyhow::ensure!(swept.limited, "the sweep ran out of rows");
    let took = started.elapsed().as_secs_f64();
    Ok(Sample { rate: swept.rows() as f64 / took, latencies: vec![took * 1e3] })
}
