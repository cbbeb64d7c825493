//! Every interleaving of a few calls, on the real server, with the real crate: `script/interleave` runs it.

mod actors;
mod edits;
mod ends;
mod explore;
#[path = "../../../tests/support/fixture.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod fixture;
mod mutants;
mod scenarios;
mod statement;
mod wire;
mod world;

use std::collections::{BTreeSet, VecDeque};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use sqlx::postgres::PgConnectOptions;
use tokio::runtime::{Builder, Runtime};

use ends::Ends;
use explore::{Found, Search};
use mutants::{Searched, Sql};
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
        return runtime()?.block_on(run_one(arguments, schedule));
    }
    let all = arguments.only.is_empty();
    anyhow::ensure!(all || !arguments.mutants || !arguments.record, "mutants are recorded with all scenarios");
    let started = Instant::now();
    let server = &arguments.database_url;
    let mut ends = Ends::read()?;
    let ran = share(server, "interleave", arguments.chosen(), async |database, scenario| {
        let began = Instant::now();
        let found = run(database, &scenario).await;
        let others = match &found {
            Ok(found) if !arguments.record => ends.others(&scenario.name, &found.ends),
            _ => Vec::new(),
        };
        tell(&scenario.name, &found, &others, began.elapsed());
        (scenario.name, found, others.len())
    })?;
    let (mut schedules, mut violations) = (0, 0);
    let (mut sql, mut functions) = (Sql::new(), BTreeSet::new());
    let mut searched = Vec::new();
    for (name, found, others) in ran {
        let Ok(found) = found else {
            violations += 1;
            continue;
        };
        schedules += found.schedules;
        violations += found.violations.len() + others;
        if arguments.record {
            ends.record(name.clone(), found.ends);
        }
        let sent = found.sql.keys().cloned().chain(found.functions.iter().cloned()).collect();
        searched.push(Searched { name, sent, begun: found.schedules + found.merged });
        found.sql.into_iter().for_each(|(name, texts)| sql.entry(name).or_default().extend(texts));
        functions.extend(found.functions);
    }
    runtime()?.block_on(world::add_functions(server, &functions, &mut sql))?;
    if arguments.record {
        ends.write()?;
    }
    if arguments.mutants && violations == 0 {
        if arguments.record {
            mutants::record(server, &ends, &sql, &searched)?;
        } else {
            violations += mutants::hold(server, &ends, &searched)?;
        }
    }
    if all {
        let wrong = mutants::check(&sql);
        wrong.iter().for_each(|wrong| println!("{wrong}"));
        violations += wrong.len();
    }
    let seconds = started.elapsed().as_secs();
    println!("{} scenarios, {schedules} schedules, {violations} violations, {seconds} s", searched.len());
    Ok(violations == 0 && !searched.is_empty())
}

/// One line for a scenario, and more for what is wrong.
fn tell(name: &str, found: &anyhow::Result<Found>, others: &[String], took: Duration) {
    match found {
        Err(error) => println!("{name}: did not come to its end: {error:#}"),
        Ok(found) => {
            let Found { schedules, merged, ends, violations, .. } = found;
            println!(
                "{name}: {schedules} schedules, {merged} merged, {} ends, {:.1} s",
                ends.len(),
                took.as_secs_f64()
            );
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

/// All tasks of a world run in one thread, so the order of their steps depends on little.
fn runtime() -> anyhow::Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Shares work among some threads, each with a database of its own, and returns the results in the order in which they
/// came.
fn share<W: Send, R: Send>(
    server: &PgConnectOptions,
    database: &str,
    work: Vec<W>,
    run: impl AsyncFn(&PgConnectOptions, W) -> R + Sync,
) -> anyhow::Result<Vec<R>> {
    let work = Mutex::new(VecDeque::from(work));
    let (sender, results) = mpsc::channel();
    let (work, run) = (&work, &run);
    std::thread::scope(|scope| {
        // Most of the time a world waits for the server.
        let threads: Vec<_> = (0..2 * std::thread::available_parallelism()?.get())
            .map(|thread| {
                let sender = sender.clone();
                scope.spawn(move || {
                    runtime()?.block_on(async {
                        let database = world::create_database(server, &format!("{database}_{thread}")).await?;
                        loop {
                            let next = work.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                            let Some(next) = next else { return anyhow::Ok(()) };
                            let _ = sender.send(run(&database, next).await);
                        }
                    })
                })
            })
            .collect();
        drop(sender);
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))??;
        }
        Ok(results.into_iter().collect())
    })
}
