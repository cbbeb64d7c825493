//! Calls a second and what each takes, of alternatives in turns.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlx::{AssertSqlSafe, Executor as _};

use crate::alternatives::pgbench;
use crate::bench::Bench;
use crate::client::{Client, next_call};
use crate::setting::Setting;
use crate::way::{Way, Work};

/// What one slice of one alternative came to.
pub(crate) struct Sample {
    pub(crate) rate: f64,
    /// In milliseconds.
    pub(crate) latencies: Vec<f64>,
}

pub(crate) struct Measured {
    pub(crate) way: Way,
    /// Of each round.
    rates: Vec<f64>,
    latencies: Vec<f64>,
}

impl Measured {
    pub(crate) fn of_rounds(way: Way) -> Self {
        Self { way, rates: Vec::new(), latencies: Vec::new() }
    }

    /// Takes in a round.
    pub(crate) fn add(&mut self, rate: f64, latencies: Vec<f64>) {
        self.rates.push(rate);
        self.latencies.extend(latencies);
        self.latencies.sort_by(f64::total_cmp);
    }

    /// The slowest and the fastest round.
    pub(crate) fn range(&self) -> [f64; 2] {
        let ends = |ends: [f64; 2], rate: &f64| [ends[0].min(*rate), ends[1].max(*rate)];
        self.rates.iter().fold([f64::INFINITY, 0.0], ends)
    }

    /// Units a second: the median of the rounds.
    pub(crate) fn rate(&self) -> f64 {
        median(self.rates.clone())
    }

    pub(crate) fn percentile(&self, share: f64) -> f64 {
        percentile(&self.latencies, share)
    }

    /// The median call's time, as a multiple of the other's.
    pub(crate) fn slower(&self, other: &Self) -> f64 {
        self.percentile(0.5) / other.percentile(0.5)
    }

    /// The median of the ratios of each round.
    pub(crate) fn against(&self, other: &Self) -> f64 {
        median(self.rates.iter().zip(&other.rates).map(|(this, other)| this / other).collect())
    }
}

/// The one of this name; an alternative that was not to be had is not among them.
pub(crate) fn named<'m>(measured: &'m [Measured], name: &str) -> Option<&'m Measured> {
    measured.iter().find(|measured| measured.way.name == name)
}

/// A B C A B C …, by as many clients, each with a connection that it keeps.
pub(crate) async fn interleave(
    bench: &Bench,
    setting: &Setting,
    clients: usize,
    ways: Vec<Way>,
) -> anyhow::Result<Vec<Measured>> {
    in_turns(bench, setting, clients, ways, false).await
}

/// As [`interleave`], and the table of an alternative is empty when its turn begins. Otherwise the alternatives that
/// share the crate's table would work on the rows of all of them, and one with a table of its own on fewer.
pub(crate) async fn interleave_from_empty(
    bench: &Bench,
    setting: &Setting,
    clients: usize,
    ways: Vec<Way>,
) -> anyhow::Result<Vec<Measured>> {
    in_turns(bench, setting, clients, ways, true).await
}

async fn in_turns(
    bench: &Bench,
    setting: &Setting,
    clients: usize,
    ways: Vec<Way>,
    from_empty: bool,
) -> anyhow::Result<Vec<Measured>> {
    let mut observer = bench.plain().connect(None).await?;
    let mut teams = HashMap::new();
    for way in &ways {
        if !teams.contains_key(&way.database) {
            teams.insert(way.database.clone(), team(setting, clients, way.database.as_deref()).await?);
        }
    }
    let mut measured: Vec<_> = ways.into_iter().map(Measured::of_rounds).collect();
    for round in 0..=bench.scale.rounds {
        // pgbench is told a number of calls, about as many as the first one makes.
        let mut calls = 0.0;
        for one in &mut measured {
            if let Some(table) = one.way.table.filter(|_| from_empty) {
                observer.execute(AssertSqlSafe(format!("truncate {table}"))).await?;
            }
            let sample = match &one.way.work {
                Work::Call(_) => {
                    let team = teams.get_mut(&one.way.database).context("connected above")?;
                    sample(team, &one.way, bench.scale.slice).await?
                }
                Work::Pgbench { program, script } => {
                    pgbench::sample(program, script, setting, clients, calls / clients as f64).await?
                }
            };
            if calls == 0.0 {
                calls = sample.rate * bench.scale.slice.as_secs_f64();
            }
            if round > 0 {
                one.add(sample.rate, sample.latencies);
            }
        }
    }
    Ok(measured)
}

pub(crate) async fn team(setting: &Setting, clients: usize, database: Option<&str>) -> anyhow::Result<Vec<Client>> {
    let mut team = Vec::new();
    for _ in 0..clients {
        team.push(Client::connect(setting, database).await?);
    }
    Ok(team)
}

pub(crate) async fn sample(team: &mut Vec<Client>, way: &Way, slice: Duration) -> anyhow::Result<Sample> {
    let started = Instant::now();
    let tasks: Vec<_> =
        team.drain(..).map(|client| tokio::spawn(call_until(client, way.clone(), started + slice))).collect();
    let mut latencies = Vec::new();
    for task in tasks {
        let (client, its) = task.await?.with_context(|| way.name.clone())?;
        team.push(client);
        latencies.extend(its);
    }
    let rate = (latencies.len() * way.units) as f64 / started.elapsed().as_secs_f64();
    Ok(Sample { rate, latencies })
}

async fn call_until(mut client: Client, way: Way, end: Instant) -> anyhow::Result<(Client, Vec<f64>)> {
    let mut latencies = Vec::new();
    // At least one, however slow the machine.
    loop {
        let began = Instant::now();
        way.call(&mut client, next_call()).await?;
        latencies.push(began.elapsed().as_secs_f64() * 1e3);
        if Instant::now() >= end {
            return Ok((client, latencies));
        }
    }
}

pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    percentile(&figures, 0.5)
}

/// Of figures in order.
pub(crate) fn percentile(figures: &[f64], share: f64) -> f64 {
    figures.get((figures.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN)
}
