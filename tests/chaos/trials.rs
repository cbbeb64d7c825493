//! The mutants on trial: each must be caught where it should be, for what is broken in it.

use std::sync::Arc;
use std::time::Duration;

use crate::arguments::Arguments;
use crate::cluster::Cluster;
use crate::mutant::{TRIALS, Trial};
use crate::play;
use crate::stage::{Finding, Stage};
use crate::subject::Subject;

/// In which a mutant must be caught; tried again where it was lucky.
const TIME: Duration = Duration::from_secs(2);
const TRIES: u64 = 10;

/// Whether all were caught, and the one that is not broken was not.
pub(crate) async fn hold(cluster: &Arc<Cluster>, arguments: &Arguments) -> anyhow::Result<bool> {
    let mut told = Vec::new();
    let mut escaped = 0;
    for trial in TRIALS {
        println!("{}, in {}", trial.mutant.name(), trial.scenario);
        let (finding, tries) = hold_one(cluster, arguments.seed, trial).await;
        let violation = finding.violations.iter().find(|said| trial.violation.is_none_or(|words| said.contains(words)));
        let verdict = match (trial.violation, violation, &finding.skipped) {
            (_, _, Some(why)) => format!("skipped: {why}"),
            (Some(_), Some(violation), _) => format!("caught in run {tries}, {violation}"),
            (None, None, _) => "passes, as it should".to_owned(),
            (Some(_), None, _) => "ESCAPED".to_owned(),
            (None, Some(violation), _) => format!("FAILED, {violation}"),
        };
        escaped += usize::from(finding.skipped.is_none() && violation.is_some() != trial.violation.is_some());
        println!("  {verdict}");
        told.push(format!("{:<34} {:<28} {verdict}", trial.mutant.name(), trial.scenario));
    }
    println!("\n{:<34} {:<28} verdict", "mutant", "scenario");
    told.iter().for_each(|line| println!("{line}"));
    Ok(escaped == 0)
}

async fn hold_one(cluster: &Arc<Cluster>, seed: u64, trial: &Trial) -> (Finding, u64) {
    for attempt in 1.. {
        let seed = seed.wrapping_add(attempt);
        let finding =
            play(trial.scenario, Stage::new(cluster.clone(), Subject::Mutant(trial.mutant), seed, TIME)).await;
        let done = trial.violation.is_none_or(|words| finding.violations.iter().any(|said| said.contains(words)));
        if done || attempt == TRIES || finding.skipped.is_some() {
            return (finding, attempt);
        }
    }
    unreachable!("it ends with the last try")
}
