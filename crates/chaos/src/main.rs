//! The crate under faults, on servers of the suite's own: `script/chaos` runs it. The [`checker`] knows what was
//! promised, [`scenario`] has the faults, and [`trials`] what the suite has to catch.

mod arguments;
mod beside;
mod callers;
mod checker;
mod citus;
mod cluster;
mod error_checker;
mod history;
#[cfg(test)]
mod history_checker;
mod keeper;
mod lease;
mod lease_checker;
mod mutant;
mod pair;
mod patroni;
mod plain_sql;
mod pooler;
mod proxy;
mod random;
mod release_checker;
mod report;
mod scenario;
mod settling;
mod stage;
mod step_checker;
mod stepped;
mod subject;
mod trials;
mod worker;
mod world;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use arguments::Arguments;
use cluster::Cluster;
use report::{Row, told};
use stage::{Finding, Stage};

/// In which a scenario can do something at all: a server takes a second to come up again.
const LEAST: Duration = Duration::from_millis(1500);
/// How much longer one may take on a busy machine, for its faults to happen.
const PATIENCE: Duration = Duration::from_secs(90);
/// The same for the share of `--operations`. The slowest scenario makes some ten calls a second.
const PATIENCE_WITH_OPERATIONS: Duration = Duration::from_secs(3600);

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

/// Whether all is well.
async fn start() -> anyhow::Result<bool> {
    if worker::run().await? {
        return Ok(true);
    }
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    if arguments.list {
        arguments::list();
        return Ok(true);
    }
    let cluster = Arc::new(Cluster::start(&[]).await?);
    if arguments.mutants { trials::hold(&cluster, &arguments).await } else { play_all(&cluster, &arguments).await }
}

async fn play_all(cluster: &Arc<Cluster>, arguments: &Arguments) -> anyhow::Result<bool> {
    let scenarios = arguments.scenarios();
    let weights: u32 = scenarios.iter().map(|(_, weight)| weight).sum();
    let mut rows = Vec::new();
    for (name, weight) in scenarios {
        let time = (Duration::from_secs(arguments.seconds) * weight / weights).max(LEAST);
        println!("{name}, for {:.1} s, of {}", time.as_secs_f64(), arguments.subject.name());
        let mut stage = Stage::new(cluster.clone(), arguments.subject, arguments.seed, time, PATIENCE);
        if arguments.operations > 0 {
            let calls = arguments.operations * u64::from(weight) / u64::from(weights);
            stage = stage.with_calls(calls, PATIENCE_WITH_OPERATIONS);
        }
        let finding = play(name, stage).await;
        told(name, &finding);
        report::keep_histories(name, arguments.seed, &finding.histories)?;
        rows.push(Row { name: name.to_owned(), finding });
    }
    report::table(&rows, arguments.seed);
    Ok(rows.iter().all(|row| row.finding.violations.is_empty()))
}

/// A scenario that cannot come to its end has not kept its promise.
async fn play(name: &str, stage: Stage) -> Finding {
    let played = tokio::select! {
        played = scenario::play(name, &stage) => played,
        () = report::progress(name, &stage) => unreachable!("it goes on for ever"),
    };
    played.unwrap_or_else(|error| Finding {
        violations: vec![format!("{name} did not come to its end: {error:#}")],
        ..Finding::default()
    })
}
