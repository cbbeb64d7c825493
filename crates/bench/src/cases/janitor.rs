//! What a sweep is worth, and what it costs the callers beside it.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use pg_idempotency::Janitor;

use super::records::{settle, store_expired};
use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::response;
use crate::measure::{Measured, median, sample, team};
use crate::report::Report;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
The table contains expired records. *Paced* is the default: a batch of 1000 rows, then a pause of 50 ms. It measures first \
calls of 8 clients, with and without the sweep in turns. *Unpaced*, in batches of 10 000, measures how fast the sweep \
deletes rows.";

const NAME: &str = "janitor";
/// What the default pace cannot exceed.
const PACED_ROWS_PER_SECOND: f64 = 20_000.0;
const LARGE: NonZeroU32 = NonZeroU32::new(10_000).unwrap();

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let setting = &bench.near()[0];
    bench.clear().await?;
    let mut conn = bench.plain().connect(None).await?;
    store_expired(&mut conn, bench.scale.expired).await?;

    // No slice may run out of rows, and half of them are left for the other measurement.
    let affordable = bench.scale.expired as f64 / 2.0 / (bench.scale.rounds + 1) as f64 / PACED_ROWS_PER_SECOND;
    let slice = Duration::from_secs_f64(affordable).min(bench.scale.slice * 4);
    let pool = setting.pool(2).await?;
    let janitor = Janitor::new(pool.clone()).with_grace(Duration::ZERO);
    let mut team = team(setting, 8, None).await?;
    let way = library::first_call(response(300).into());
    let nothing = |name| Measured::of_rounds(Way::new(name, |_, _| Box::pin(async { Ok(()) })));
    let mut measured = ["without the sweep", "beside the sweep, paced"].map(nothing);
    let mut swept = Vec::new();
    for round in 0..=bench.scale.rounds {
        // Who is first takes turns.
        for sweeping in [round % 2, 1 - round % 2] {
            let sample = if sweeping == 1 {
                // About three quarters of what the pace allows, so that the sweep ends shortly before or after the slice.
                let limit = (slice.as_secs_f64() * PACED_ROWS_PER_SECOND * 0.75) as u64;
                let sweep = async {
                    let started = Instant::now();
                    janitor.sweep_once(limit).await.map(|deleted| (deleted, started.elapsed()))
                };
                let (sample, deleted) = tokio::join!(sample(&mut team, &way, slice), sweep);
                let (deleted, took) = deleted?;
                anyhow::ensure!(deleted.limited, "the sweep ran out of rows");
                swept.push(deleted.rows() as f64 / took.as_secs_f64());
                sample?
            } else {
                sample(&mut team, &way, slice).await?
            };
            if round > 0 {
                measured[sweeping].add(sample.rate, sample.latencies);
            }
        }
    }
    report.speeds(NAME, "8 clients", setting.told(), "first calls", &measured);
    let ratio = measured[1].against(&measured[0]);
    let told = Some(setting.told());
    report.figure(NAME, "Janitor, paced: rate of first calls beside it over that without it", told, Some(ratio));
    report.figure(NAME, "Janitor, paced: rows a second", told, Some(median(swept)));

    settle(&mut conn).await?;
    let janitor = Janitor::new(pool).with_grace(Duration::ZERO).with_batch_size(LARGE).with_pause(Duration::ZERO);
    let started = Instant::now();
    let swept = janitor.sweep_once(u64::MAX).await?;
    let rate = swept.rows() as f64 / started.elapsed().as_secs_f64();
    report.figure(NAME, "Janitor, unpaced: rows a second", told, Some(rate));
    bench.clear().await
}
