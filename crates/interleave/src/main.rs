//! Every interleaving of a few calls, on the real server, with the real crate: `script/interleave` runs it.

mod actors;
mod ends;
mod explore;
mod mutants;
mod scenarios;
mod statement;
mod threads;
mod trial;
mod wire;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use sqlx::postgres::PgConnectOptions;

use ends::Ends;
use explore::{Found, Search};
use scenarios::Scenario;
use statement::Edits;
use world::World;

#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// A server of its own. Each thread creates a database.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database_url: PgConnectOptions,
    /// Only the scenarios whose names contain one of these.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Edits each condition of the crate's SQL, too: a scenario has to find it, or a reason has to be written.
    #[arg(long)]
    mutants: bool,
    /// Writes down how the scenarios end, and what finds the mutants, instead of comparing it.
    #[arg(long)]
    record: bool,
    /// Runs this one schedule, as a violation shows it, and prints its steps.
    #[arg(long, env)]
    schedule: Option<String>,
}

impl Arguments {
    fn chosen(&self) -> Vec<Scenario> {
        let mut scenarios = scenarios::all();
        if !self.only.is_empty() {
            scenarios.retain(|scenario| self.only.iter().any(|only| scenario.name.contains(only)));
        }
        scenarios
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match start(&arguments) {
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
    if let Some(schedule) = &arguments.schedule {
        return threads::runtime()?.block_on(run_one(arguments, schedule));
    }
    let started = Instant::now();
    let mut recorded = Ends::read()?;
    let ran = threads::share(&arguments.database_url, "interleave", arguments.chosen(), async |database, scenario| {
        let began = Instant::now();
        let found = run(database, &scenario).await;
        let seconds = began.elapsed().as_secs_f64();
        let others = found.as_ref().map(|found| recorded.others(&scenario.name, &found.ends));
        tell(
            &scenario.name,
            &found,
            if arguments.record { &[] } else { others.as_deref().unwrap_or_default() },
            seconds,
        );
        (scenario.name, found)
    })?;
    let scenarios = ran.len();
    let (mut schedules, mut violations) = (0, 0);
    let mut searched = Vec::new();
    for (name, found) in ran {
        let Ok(found) = found else {
            violations += 1;
            continue;
        };
        schedules += found.schedules;
        violations += found.violations.len();
        if arguments.record {
            recorded.record(name.clone(), found.ends);
        } else {
            violations += recorded.others(&name, &found.ends).len();
        }
        searched.push(trial::Searched { name, texts: found.texts, begun: found.schedules + found.merged });
    }
    if arguments.record {
        recorded.write()?;
    }
    if arguments.mutants && violations == 0 {
        violations += trial::hold(&arguments.database_url, &recorded, searched, arguments.record)?;
    }
    let seconds = started.elapsed().as_secs();
    println!("{scenarios} scenarios, {schedules} schedules, {violations} violations, {seconds} s");
    Ok(violations == 0 && scenarios > 0)
}

/// One line for a scenario, and more for what is wrong.
fn tell(name: &str, found: &anyhow::Result<Found>, others: &[String], seconds: f64) {
    match found {
        Err(error) => println!("{name}: did not come to its end: {error:#}"),
        Ok(found) => {
            let Found { schedules, merged, ends, violations, .. } = found;
            println!("{name}: {schedules} schedules, {merged} merged, {} ends, {seconds:.1} s", ends.len());
            violations.iter().for_each(|(what, trace)| println!("    {what}\n        {trace}"));
            others.iter().for_each(|other| println!("    {other}"));
        }
    }
}

async fn run(database: &PgConnectOptions, scenario: &Scenario) -> anyhow::Result<Found> {
    let mut world = World::open(database, Edits { inside: scenario.inside, mutant: None }).await?;
    let found = Search::new(&mut world, scenario).run(|_| false).await;
    world.close().await?;
    found
}

async fn run_one(arguments: &Arguments, schedule: &str) -> anyhow::Result<bool> {
    let scenario = arguments.chosen().into_iter().next().context("no scenario has such a name")?;
    let database = world::create_database(&arguments.database_url, "interleave").await?;
    let mut world = World::open(&database, Edits { inside: scenario.inside, mutant: None }).await?;
    let (trace, found) = Search::new(&mut world, &scenario).run_one(schedule).await?;
    world.close().await?;
    println!("{}: {trace}", scenario.name);
    found.ends.iter().for_each(|end| println!("    {end}"));
    found.violations.keys().for_each(|what| println!("    {what}"));
    Ok(found.violations.is_empty())
}
