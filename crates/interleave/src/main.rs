//! Every interleaving of a few calls, on the real server, with the real crate: `script/interleave` runs it.

mod actors;
mod edits;
mod explore;
mod mutants;
mod record;
mod scenarios;
mod statement;
mod threads;
mod trace;
mod wire;
mod words;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use sqlx::postgres::PgConnectOptions;

use edits::{Edits, Sql};
use explore::{Found, Search};
use mutants::Searched;
use scenarios::Scenario;
use threads::{runtime, share};
use world::World;

/// How the scenarios end.
const ENDS: &str = "ends.txt";

#[derive(Debug, Parser)]
struct Arguments {
    /// A server of its own. Each thread creates a database.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database_url: PgConnectOptions,
    /// Only the scenarios whose names contain one of these.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Edits each condition of the crate's SQL, too, or of the statements whose names contain this. The scenario that
    /// mutants.txt names has to find the edit.
    #[arg(long, value_name = "STATEMENT", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    mutants: Option<String>,
    /// Tries the edits without a line in mutants.txt, too, and prints those that survive. This takes far longer.
    #[arg(long, requires = "mutants", conflicts_with = "record")]
    others: bool,
    /// Writes down how the scenarios end, and what finds the mutants, instead of comparing it.
    #[arg(long)]
    record: bool,
    /// Writes the traces of the schedules to this file, as a module for script/model. With mutants, their traces.
    #[arg(long, value_name = "FILE")]
    traces: Option<std::path::PathBuf>,
    /// Runs this one schedule, as a violation shows it, and prints its steps.
    #[arg(long, env)]
    schedule: Option<String>,
}

fn main() -> ExitCode {
    match start(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("interleave: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all is well.
fn start(arguments: &Arguments) -> anyhow::Result<bool> {
    let all = arguments.only.is_empty();
    anyhow::ensure!(all || arguments.mutants.is_none() || !arguments.record, "mutants are recorded with all scenarios");
    let mut scenarios = scenarios::all();
    scenarios.retain(|scenario| all || arguments.only.iter().any(|only| scenario.name.contains(only)));
    let started = Instant::now();
    // Most of the time a world waits for the server.
    let threads = 3 * std::thread::available_parallelism()?.get();
    let databases = runtime()?.block_on(world::create_databases(&arguments.database_url, threads))?;
    if let Some(schedule) = &arguments.schedule {
        let scenario = scenarios.first().context("no scenario has such a name")?;
        return runtime()?.block_on(run_one(&databases[0], scenario, schedule));
    }
    let mut ends = record::read(ENDS)?;
    let ran = share(&databases, scenarios, async |database, scenario| {
        let began = Instant::now();
        let found = run(database, &scenario).await;
        let wrong = match &found {
            Ok(found) => {
                let others = if arguments.record { Vec::new() } else { found.others(ends.get(&scenario.name)) };
                let violations = found.violations.iter().map(|(what, trace)| format!("{what}\n        {trace}"));
                violations.chain(others).collect()
            }
            Err(error) => vec![format!("did not come to its end: {error:#}")],
        };
        let found = found.unwrap_or_default();
        let Found { schedules, merged, .. } = found;
        let (name, seconds) = (&scenario.name, began.elapsed().as_secs_f64());
        println!("{name}: {schedules} schedules, {merged} merged, {} ends, {seconds:.1} s", found.ends.len());
        wrong.iter().for_each(|wrong| println!("    {wrong}"));
        ((scenario, found), wrong.len())
    })?;
    let (searched, wrong): (Vec<Searched>, Vec<usize>) = ran.into_iter().unzip();
    let schedules: usize = searched.iter().map(|(_, found)| found.schedules).sum();
    let mut violations: usize = wrong.into_iter().sum();
    let mut sql = Sql::new();
    for (_, found) in &searched {
        found.sql.iter().for_each(|(name, texts)| sql.entry(name.clone()).or_default().extend(texts.iter().cloned()));
    }
    let mut traces = trace::Module::default();
    let specified = searched.iter().filter(|(scenario, _)| scenario.is_specified());
    specified.for_each(|(scenario, found)| traces.add(&scenario.name, &found.tree));
    if arguments.record && violations == 0 {
        ends.extend(searched.iter().map(|(scenario, found)| (scenario.name.clone(), found.ends.clone())));
        record::write(ENDS, &ends)?;
    }
    match &arguments.mutants {
        Some(name) if violations == 0 && arguments.record => mutants::record(&databases, name, &sql, &searched)?,
        Some(name) if violations == 0 => {
            let (lost, of_mutants) = mutants::hold(&databases, name, &searched)?;
            violations += lost;
            traces = of_mutants;
            if arguments.others {
                violations += mutants::try_others(&databases, name, &sql, &searched)?;
            }
        }
        _ => {}
    }
    if let Some(file) = &arguments.traces {
        std::fs::write(file, traces.text())?;
    }
    if all {
        let wrong = mutants::check(&sql, &searched)?;
        wrong.iter().for_each(|wrong| println!("{wrong}"));
        violations += wrong.len();
    }
    let seconds = started.elapsed().as_secs();
    println!("{} scenarios, {schedules} schedules, {violations} violations, {seconds} s", searched.len());
    Ok(violations == 0 && !searched.is_empty())
}

async fn run(database: &PgConnectOptions, scenario: &Scenario) -> anyhow::Result<Found> {
    let mut world = World::open(database, Edits { inside: scenario.is_inside(), mutant: None }).await?;
    let found = Search::new(&mut world, scenario).run(|_| false).await;
    world.close().await?;
    found
}

async fn run_one(database: &PgConnectOptions, scenario: &Scenario, schedule: &str) -> anyhow::Result<bool> {
    let mut world = World::open(database, Edits { inside: scenario.is_inside(), mutant: None }).await?;
    let (trace, found) = Search::new(&mut world, scenario).run_one(schedule).await?;
    world.close().await?;
    println!("{}: {trace}", scenario.name);
    found.ends.iter().chain(found.violations.keys()).for_each(|line| println!("    {line}"));
    Ok(found.violations.is_empty())
}
