//! The crate under faults, on servers of the suite's own. `script/chaos` runs it.
//!
//! # Layout
//!
//! Each floor uses only those below it:
//!
//! - [`trials`] and this file play the scenarios; [`report`] prints what they found.
//! - [`scenario`] is the table of the faults, each with the broken variants that it has to catch.
//! - [`worker`] and [`proxy`] kill, suspend and cut [`callers`], which make all calls.
//! - [`subject`] makes a call in transaction mode, through the library or the SQL functions ([`sql_door`]), or lets a
//!   broken variant make it ([`plain_sql`]).
//! - [`service`] is a handler behind the HTTP layer, and its client.
//! - [`world`] is the database of some callers, with their history and the faults.
//! - [`stage`] is what a scenario is given, and [`finding`] what it returns.
//! - [`checker`] is what the crate promises.
//! - [`cluster`] and [`patroni`] are the servers. [`keeper`] ends them.
//! - [`request`], [`mutant`], [`history`] and [`random`] are the words of all.

mod callers;
mod checker;
mod cluster;
mod finding;
mod history;
mod keeper;
mod mutant;
mod patroni;
mod plain_sql;
mod proxy;
mod random;
mod report;
mod request;
mod scenario;
mod service;
mod sql_door;
mod stage;
mod subject;
mod trials;
mod worker;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use clap::builder::PossibleValuesParser;

use cluster::Cluster;
use scenario::{SCENARIOS, Scenario, Servers};
use stage::Stage;

/// The shortest time for a scenario: a server needs a second to restart.
const LEAST: Duration = Duration::from_millis(1500);
/// How much longer a scenario may take on a busy machine, for its faults to happen.
const PATIENCE: Duration = Duration::from_secs(90);

/// Runs the crate under faults, and compares the answers of the calls with the tables of the database.
#[derive(Clone, Debug, Parser)]
#[command(name = "script/chaos")]
struct Arguments {
    /// The time of all scenarios together, without that to start and to settle.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Decides which calls are made, and which of them a fault hits. The default is a new one.
    #[arg(long)]
    seed: Option<u64>,
    /// Plays only these scenarios.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = names())]
    only: Vec<String>,
    /// Plays the scenarios under Patroni instead, if patroni and etcd are installed.
    #[arg(long)]
    patroni: bool,
    /// Plays every broken variant, and fails if its scenario does not catch it.
    #[arg(long)]
    mutants: bool,
    /// Writes histories of calls to this file, for `script/model --histories`.
    #[arg(long, value_name = "FILE")]
    histories: Option<PathBuf>,
}

impl Arguments {
    fn scenarios(&self) -> Vec<&'static Scenario> {
        let is_chosen = |scenario: &&Scenario| match scenario.servers {
            _ if !self.only.is_empty() => self.only.iter().any(|name| name == scenario.name),
            Servers::Own => !self.patroni,
            Servers::Patroni => self.patroni,
        };
        SCENARIOS.iter().filter(is_chosen).collect()
    }
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(SCENARIOS.iter().map(|scenario| scenario.name))
}

#[tokio::main]
async fn main() -> ExitCode {
    match start().await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("chaos: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether there is no violation, and every mutant was caught.
async fn start() -> anyhow::Result<bool> {
    if worker::run().await? {
        return Ok(true);
    }
    let arguments = Arguments::parse();
    let scenarios = arguments.scenarios();
    let seed = arguments.seed.unwrap_or_else(|| history::now() % 1_000_000);
    let cluster = Arc::new(Cluster::start(&[]).await?);
    if arguments.mutants {
        let (all_well, told) = trials::hold(&cluster, &scenarios, seed, PATIENCE).await?;
        report::tell(arguments.histories.as_deref(), told.iter().map(|(of, told)| (&**of, told)))?;
        return Ok(all_well);
    }
    let weights: u32 = scenarios.iter().map(|scenario| scenario.weight).sum();
    let mut rows = Vec::new();
    for scenario in scenarios {
        let stage = Stage {
            name: scenario.name,
            cluster: cluster.clone(),
            mutant: None,
            seed,
            time: (Duration::from_secs(arguments.seconds) * scenario.weight / weights).max(LEAST),
            patience: PATIENCE,
        };
        println!("{}, for {:.1} s", scenario.name, stage.time.as_secs_f64());
        let finding = scenario.play(&stage).await;
        report::summary(scenario.name, &finding);
        report::keep_histories(scenario.name, seed, &finding.histories)?;
        rows.push((scenario.name, finding));
    }
    report::table(&rows, seed);
    report::tell(arguments.histories.as_deref(), rows.iter().map(|(of, finding)| (*of, &finding.told)))?;
    Ok(rows.iter().all(|(_, finding)| finding.violations.is_empty()))
}
