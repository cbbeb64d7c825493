//! Plays the broken variants. Each must be caught by its scenario, with the expected violation.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;

use crate::checker::histories::Told;
use crate::cluster::Cluster;
use crate::finding::Finding;
use crate::scenario::{SCENARIOS, Scenario, Servers, Trial};
use crate::stage::Stage;

/// The time of one try. A mutant that was lucky is tried again, which happens more often on a busy machine.
const TIME: Duration = Duration::from_secs(2);
const TRIES: u64 = 30;

/// Returns whether every mutant was caught, and the variant that is not broken passes. The histories are those of the
/// keys with a violation.
pub(crate) async fn hold(
    cluster: &Arc<Cluster>,
    scenarios: &[&'static Scenario],
    seed: u64,
    patience: Duration,
) -> anyhow::Result<(bool, Vec<(String, Told)>)> {
    for scenario in SCENARIOS.iter().filter(|scenario| scenario.servers != Servers::Patroni) {
        let is_tried = scenario.trials.iter().any(|trial| trial.violation.is_some());
        ensure!(is_tried, "{} has no mutant, so it may see nothing", scenario.name);
    }
    let (mut lines, mut told) = (Vec::new(), Vec::new());
    let mut all_well = true;
    for (scenario, trial) in scenarios.iter().flat_map(|one| one.trials.iter().map(move |trial| (one, trial))) {
        let line = format!("{:<28} {:<28}", trial.mutant.name(), scenario.name);
        println!("{line}");
        let (mut finding, tries) = hold_one(cluster, scenario, trial, seed, patience).await;
        let found = finding.violations.iter().find(|found| trial.violation.is_none_or(|words| found.contains(words)));
        let verdict = match (trial.violation, found, &finding.skipped) {
            (_, _, Some(why)) => format!("skipped: {why}"),
            (Some(_), Some(found), _) => format!("caught in run {tries}, {found}"),
            (None, None, _) => "passes, as it should".to_owned(),
            (Some(_), None, _) => "ESCAPED".to_owned(),
            (None, Some(found), _) => format!("FAILED, {found}"),
        };
        all_well &= finding.skipped.is_some() || found.is_some() == trial.violation.is_some();
        println!("  {verdict}");
        lines.push(format!("{line} {verdict}"));
        let is_violated = |key: &str| finding.violations.iter().any(|found| found.starts_with(&format!("{key}: ")));
        finding.told.histories.retain(|history| is_violated(&history.key));
        told.push((format!("{} {}", trial.mutant.name(), scenario.name), finding.told));
    }
    println!("\n{:<28} {:<28} verdict\n{}", "mutant", "scenario", lines.join("\n"));
    Ok((all_well, told))
}

async fn hold_one(
    cluster: &Arc<Cluster>,
    scenario: &Scenario,
    trial: &Trial,
    seed: u64,
    patience: Duration,
) -> (Finding, u64) {
    for attempt in 1.. {
        let stage = Stage {
            name: scenario.name,
            cluster: cluster.clone(),
            mutant: Some(trial.mutant),
            seed: seed.wrapping_add(attempt),
            time: TIME,
            // A mutant may prevent the faults themselves, and is then tried again. The variant that must pass must pass
            // under all of them.
            patience: if trial.violation.is_some() { Duration::ZERO } else { patience },
        };
        let finding = scenario.play(&stage).await;
        let is_done = trial.violation.is_none_or(|words| finding.violations.iter().any(|found| found.contains(words)));
        if is_done || attempt == TRIES || finding.skipped.is_some() {
            return (finding, attempt);
        }
    }
    unreachable!("it ends with the last try")
}
