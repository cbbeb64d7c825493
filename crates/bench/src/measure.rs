//! The one loop that measures: alternatives take turns, A B C A B C …, so a machine that becomes slower affects all of
//! them equally.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlx::{AssertSqlSafe, Executor as _};

use crate::bench::Bench;
use crate::client::{Client, next_call};
use crate::processor::{postmaster, processor_time};
use crate::results::Row;
use crate::setting::Setting;
use crate::way::Way;

/// The result of one turn.
pub(crate) struct Sample {
    pub(crate) rate: f64,
    /// In milliseconds.
    pub(crate) latencies: Vec<f64>,
}

/// One round more than `rounds`: the first warms connections and statements. `turn` measures the alternative with this
/// number once.
pub(crate) async fn in_turns(
    rounds: usize,
    names: impl IntoIterator<Item = impl Into<String>>,
    mut turn: impl AsyncFnMut(usize) -> anyhow::Result<Sample>,
) -> anyhow::Result<Vec<Row>> {
    let mut measured: Vec<(String, _, _)> =
        names.into_iter().map(|name| (name.into(), Vec::new(), Vec::new())).collect();
    for round in 0..=rounds {
        for (at, (_, rates, latencies)) in measured.iter_mut().enumerate() {
            let sample = turn(at).await?;
            if round > 0 {
                rates.push(sample.rate);
                latencies.extend(sample.latencies);
            }
        }
    }
    Ok(measured.into_iter().map(|(way, rates, latencies)| Row::new(way, rates, latencies)).collect())
}

/// The same number of clients calls each way, and each client keeps its connection. The table that a way fills is empty
/// when its turn begins, unless it is in a database of its own. Otherwise the ways that share the crate's table would
/// work on the rows of all of them.
pub(crate) async fn compare(
    bench: &Bench,
    setting: &Setting,
    clients: usize,
    ways: &[Way],
) -> anyhow::Result<Vec<Row>> {
    let mut observer = setting.connect(None).await?;
    let postmaster = if bench.scale.by_processor { Some(postmaster(&mut observer).await?) } else { None };
    let mut teams = HashMap::new();
    for way in ways {
        if !teams.contains_key(&way.database) {
            teams.insert(way.database.clone(), team(setting, clients, way.database.as_deref()).await?);
        }
    }
    in_turns(bench.scale.rounds, ways.iter().map(|way| &way.name), async |at| {
        let way = &ways[at];
        if let (Some(table), None) = (way.table, &way.database) {
            observer.execute(AssertSqlSafe(format!("truncate {table}"))).await?;
        }
        let team = teams.get_mut(&way.database).context("connected above")?;
        let Some(postmaster) = postmaster else { return sample(team, way, bench.scale.slice).await };
        let before = processor_time(postmaster)?;
        let mut measured = sample(team, way, bench.scale.slice).await?;
        measured.rate = measured.latencies.len() as f64 / (processor_time(postmaster)? - before);
        Ok(measured)
    })
    .await
}

pub(crate) async fn team(setting: &Setting, clients: usize, database: Option<&str>) -> anyhow::Result<Vec<Client>> {
    let mut team = Vec::new();
    for _ in 0..clients {
        team.push(Client::connect(setting, database).await?);
    }
    Ok(team)
}

pub(crate) async fn sample(team: &mut Vec<Client>, way: &Way, slice: Duration) -> anyhow::Result<Sample> {
    paced(team, way, slice, Duration::ZERO).await
}

/// Each client pauses until this time after the begin of its last call.
pub(crate) async fn paced(
    team: &mut Vec<Client>,
    way: &Way,
    slice: Duration,
    pause: Duration,
) -> anyhow::Result<Sample> {
    let started = Instant::now();
    let call = |client| tokio::spawn(call_until(client, way.clone(), started + slice, pause));
    let tasks: Vec<_> = team.drain(..).map(call).collect();
    let mut latencies = Vec::new();
    for task in tasks {
        let (client, its) = task.await?.with_context(|| way.name.clone())?;
        team.push(client);
        latencies.extend(its);
    }
    let rate = (latencies.len() * way.units) as f64 / started.elapsed().as_secs_f64();
    Ok(Sample { rate, latencies })
}

async fn call_until(mut client: Client, way: Way, end: Instant, pause: Duration) -> anyhow::Result<(Client, Vec<f64>)> {
    let mut latencies = Vec::new();
    // Each client makes at least one call, however slow the machine is.
    loop {
        let began = Instant::now();
        way.call(&mut client, next_call()).await?;
        latencies.push(began.elapsed().as_secs_f64() * 1e3);
        if !pause.is_zero() {
            tokio::time::sleep_until((began + pause).into()).await;
        }
        if Instant::now() >= end {
            return Ok((client, latencies));
        }
    }
}
