//! The mutants on trial: each must be caught where it should be, for what is broken in it.

use std::sync::Arc;
use std::time::Duration;

use crate::arguments::Arguments;
use crate::cluster::Cluster;
use crate::mutant::Mutant;
use crate::mutant::Mutant::*;
use crate::scenario;
use crate::stage::{Finding, Stage};
use crate::subject::Subject;
use crate::{PATIENCE, play};

/// A mutant, where it has to be caught, and by which words. Those that are `None` must pass.
pub(crate) struct Trial {
    pub(crate) mutant: Mutant,
    pub(crate) scenario: &'static str,
    pub(crate) violation: Option<&'static str>,
}

pub(crate) const TRIALS: &[Trial] = &[
    trial(JanitorByKey, "janitor-races", "calls performed that are to be remembered"),
    trial(AutocommitClaim, "killed-workers", "never answered"),
    trial(EffectOutside, "duplicate-storm", "effects, of"),
    trial(LostAnswerIsFailure, "cut-connections", "effects, of"),
    trial(SynchronousCommitOff, "killed-server", "which is not there"),
    trial(SynchronousCommitOff, "promoted-standby", "which is not there"),
    trial(PlainBegin, "dropped-futures", "was acknowledged, and is lost"),
    trial(PlainBegin, "duplicate-storm", "somebody else's"),
    trial(AwaitKeepsLock, "bounded-waits", "replays hold an advisory lock"),
    trial(LossIgnored, "suspended-owners", "completions were accepted"),
    trial(ErrorsSwallowed, "killed-backends", "which is not there"),
    trial(ErrorsSwallowed, "full-disk", "which is not there"),
    trial(ConflictsIgnored, "lock-conflicts", "effects, of"),
    trial(TakesOverAtMostOnce, "suspended-at-most-once", "under at most once"),
    trial(TakesOverAtMostOnce, "killed-leases-at-most-once", "under at most once"),
    trial(CompletesFirst, "killed-leases", "without an effect"),
    trial(BegunNotWritten, "killed-steps", "texts for one operation"),
    trial(SettlesAllInDoubt, "killed-steps", "texts for one operation"),
    trial(RowOutside, "suspended-steps", "an overtaken attempt"),
    trial(BegunNotDurable, "killed-server-steps", "texts for one operation"),
    trial(UnloggedRecord, "weak-durability", "effects, of"),
    trial(UnloggedRecord, "promoted-async-standby", "effects, of"),
    trial(SessionLock, "pooled-transactions", "effects, of"),
    trial(ImpatientClaim, "prepared-transactions", "effects, of"),
    trial(ImpatientClaim, "slow-network", "effects, of"),
    trial(LossIgnored, "clock-jumps", "completions were accepted"),
    trial(UnfinishedIsFree, "committed-errors", "effects, of"),
    trial(NewerIsRead, "rolling-upgrade", "which a newer release has written"),
    trial(NewerSchemaRefused, "rolling-upgrade", "does not start"),
    trial(SynchronousCommitOff, "citus-killed-worker", "which is not there"),
    trial(AutocommitClaim, "citus-killed-coordinator", "never answered"),
    trial(LostAnswerIsFailure, "citus-cut-connections", "effects, of"),
    trial(EffectOutside, "citus-moved-shards", "effects, of"),
    trial(AutocommitClaim, "citus-local-table", "never answered"),
    Trial { mutant: PlainSql, scenario: "committed-errors", violation: None },
    Trial { mutant: PlainSql, scenario: "rolling-upgrade", violation: None },
    Trial { mutant: PlainSql, scenario: "killed-workers", violation: None },
    Trial { mutant: PlainSql, scenario: "killed-server", violation: None },
    Trial { mutant: PlainSql, scenario: "cut-connections", violation: None },
    Trial { mutant: PlainSql, scenario: "janitor-races", violation: None },
    Trial { mutant: PlainSql, scenario: "citus-killed-worker", violation: None },
    Trial { mutant: PlainSql, scenario: "citus-cut-connections", violation: None },
];

const fn trial(mutant: Mutant, scenario: &'static str, violation: &'static str) -> Trial {
    Trial { mutant, scenario, violation: Some(violation) }
}

/// In which a mutant must be caught; tried again where it was lucky.
const TIME: Duration = Duration::from_secs(2);
const TRIES: u64 = 10;

/// Whether all were caught, and the one that is not broken was not.
pub(crate) async fn hold(cluster: &Arc<Cluster>, arguments: &Arguments) -> anyhow::Result<bool> {
    let tried = |name: &str| TRIALS.iter().any(|trial| trial.scenario == name && trial.violation.is_some());
    if let Some((name, _)) = scenario::ALL.iter().chain(scenario::CITUS).find(|(name, _)| !tried(name)) {
        anyhow::bail!("no mutant is on trial in {name}: nobody knows whether it sees anything");
    }
    let mut told = Vec::new();
    let mut escaped = 0;
    let wanted = arguments.scenarios();
    for trial in TRIALS.iter().filter(|trial| wanted.iter().any(|(name, _)| *name == trial.scenario)) {
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
        // A mutant may keep the faults themselves from happening, and then it is tried again; one that must pass, must
        // pass under all of them.
        let patience = if trial.violation.is_some() { Duration::ZERO } else { PATIENCE };
        let stage = Stage::new(cluster.clone(), Subject::Mutant(trial.mutant), seed, TIME, patience);
        let finding = play(trial.scenario, stage).await;
        let done = trial.violation.is_none_or(|words| finding.violations.iter().any(|said| said.contains(words)));
        if done || attempt == TRIES || finding.skipped.is_some() {
            return (finding, attempt);
        }
    }
    unreachable!("it ends with the last try")
}
