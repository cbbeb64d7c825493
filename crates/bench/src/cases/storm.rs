//! Many duplicates of one slow request at once, and what they do to callers with other keys.

use std::time::{Duration, Instant};

use pg_idempotency::{Error, Idempotency, InFlight};
use sqlx::Executor as _;
use tokio::time::{sleep, sleep_until};

use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::{BODY, Client, key, next_call, response};
use crate::measure::{Measured, team};
use crate::report::Report;
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
32 clients, each on its own connection, request the same key at once. The call that performs takes half of the measured \
time, in one statement. Under Wait the other calls wait in the database. Under Reject they get an error and ask again after \
50 ms. At the same time 4 other clients make first calls with their own keys, one call in 5 ms.";

const NAME: &str = "storm";
const DUPLICATES: usize = 32;
const OTHERS: usize = 4;
const PAUSE: Duration = Duration::from_millis(5);
const RETRY: Duration = Duration::from_millis(50);

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    for setting in bench.near() {
        for (name, in_flight) in [("Wait", InFlight::Wait(Duration::from_secs(20))), ("Reject", InFlight::Reject)] {
            bench.clear().await?;
            let options = Idempotency::new().with_in_flight(in_flight)?;
            let measured = storm(bench, setting, options).await?;
            let title = format!("Other keys beside {DUPLICATES} duplicates of one, {name}");
            report.speeds(NAME, title, setting.told(), "first calls", &measured);
            let later = measured[1].percentile(0.99) - measured[0].percentile(0.99);
            let what = format!("Storm, {name}: ms that it adds to other keys' p99");
            report.figure(NAME, what, setting.told(), Some(later));
        }
    }
    bench.clear().await
}

async fn storm(bench: &Bench, setting: &Setting, options: Idempotency) -> anyhow::Result<[Measured; 2]> {
    let nothing = |name| Measured::of_rounds(Way::new(name, |_, _| Box::pin(async { Ok(()) })));
    let mut measured = ["alone", "beside the storm"].map(nothing);
    let mut duplicates = team(setting, DUPLICATES, None).await?;
    let mut others = team(setting, OTHERS, None).await?;
    let length = bench.scale.slice;
    for round in 0..=bench.scale.rounds {
        for (at, one) in measured.iter_mut().enumerate() {
            let (end, hot) = (Instant::now() + length, next_call());
            let storm: Vec<_> = match at {
                0 => Vec::new(),
                _ => duplicates
                    .drain(..)
                    .map(|client| tokio::spawn(duplicate(client, hot, options, length / 2)))
                    .collect(),
            };
            let paced: Vec<_> = others.drain(..).map(|client| tokio::spawn(pace(client, end))).collect();
            let mut latencies = Vec::new();
            for task in paced {
                let (client, its) = task.await??;
                others.push(client);
                latencies.extend(its);
            }
            let mut performed = 0;
            for task in storm {
                let (client, won) = task.await??;
                duplicates.push(client);
                performed += usize::from(won);
            }
            anyhow::ensure!(performed == at, "{performed} of the duplicates performed");
            if round > 0 {
                one.add(latencies.len() as f64 / length.as_secs_f64(), latencies);
            }
        }
    }
    Ok(measured)
}

/// Whether it was this one who performed.
async fn duplicate(client: Client, hot: u64, options: Idempotency, work: Duration) -> anyhow::Result<(Client, bool)> {
    let key = key(hot)?;
    loop {
        let outcome = options
            .run(&client.pool, &key, BODY, async |conn| -> Result<(), Error> {
                conn.execute(sqlx::query("select pg_sleep($1)").bind(work.as_secs_f64())).await?;
                Ok(())
            })
            .await;
        match outcome {
            Ok(outcome) => return Ok((client, !outcome.is_replayed())),
            Err(Error::InFlight { .. }) => sleep(RETRY).await,
            Err(error) => return Err(error.into()),
        }
    }
}

async fn pace(mut client: Client, end: Instant) -> anyhow::Result<(Client, Vec<f64>)> {
    let way = library::first_call(response(300).into());
    let mut latencies = Vec::new();
    while Instant::now() < end {
        let began = tokio::time::Instant::now();
        way.call(&mut client, next_call()).await?;
        latencies.push(began.elapsed().as_secs_f64() * 1e3);
        sleep_until(began + PAUSE).await;
    }
    Ok((client, latencies))
}
