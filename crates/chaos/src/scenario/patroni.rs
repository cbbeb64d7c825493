//! Failover under Patroni: the leader changes in four ways, under load in all three modes. With strict synchronous
//! replication nothing that was acknowledged is lost; with asynchronous replication the losses are counted.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::checker::{self, Aftermath, by_key};
use crate::history::{Call, Moment, now};
use crate::lease::Leased;
use crate::lease_checker::{self, Promise};
use crate::patroni::callers::{Load, SETTLER, Way, calls_of};
use crate::patroni::fault::{DIRECT_NAME, Fault};
use crate::patroni::formation::{Formation, Replication};
use crate::patroni::lease_callers::{Outside, stored_results};
use crate::patroni::mark_callers;
use crate::patroni::outage::{Injected, Seen, seen};
use crate::patroni::programs::Programs;
use crate::stage::{Finding, Stage};
use crate::world::World;

/// Answers between two faults.
const BETWEEN: u64 = 200;
/// Answers that the delayed standbys do not get before the leader is lost.
const DELAYED: u64 = 200;

/// Shorter than a failover, so that the leases of callers that are cut off lapse.
const LEASE: Duration = Duration::from_secs(2);

/// Each fault at least twice under strict replication, and at least once under asynchronous.
pub(crate) async fn play(stage: &Stage, replication: Replication) -> anyhow::Result<Finding> {
    let programs = match Programs::find() {
        Ok(programs) => programs,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let formation = Formation::start(programs, replication).await?;
    let mut loads = Loads::start(stage, &formation).await?;
    let least = if replication == Replication::Strict { 2 } else { 1 };
    let mut injected = Vec::new();
    let ended = inject_all(&formation, &loads, least, stage.time, &mut injected).await;
    loads.stop().await?;
    let (mut finding, lost) = loads.check(replication).await?;
    // What was lost is worth knowing also where the formation did not recover.
    if let Err(error) = ended {
        finding.violations.push(format!("not all faults were injected and survived: {error:#}"));
    }
    let calls = calls_of(&loads.all());
    let seen = seen(&calls, &injected, &lost, DIRECT_NAME);
    finding.longest_outage = seen.iter().map(Seen::longest).max().unwrap_or_default();
    Ok(seen.iter().fold(finding, Finding::note))
}

/// Rounds of all faults, until the time is up, and not fewer than `least`.
async fn inject_all(
    formation: &Formation,
    loads: &Loads,
    least: usize,
    time: Duration,
    injected: &mut Vec<Injected>,
) -> anyhow::Result<()> {
    let until = Instant::now() + time;
    let mut round = 0;
    while round < least || Instant::now() < until {
        for fault in Fault::ALL {
            loads.transactions.goes_on(BETWEEN).await?;
            let at = now();
            let ended = fault.inject(formation, &loads.transactions, round).await;
            injected.push(Injected { kind: fault.name(), at, over: now() });
            ended?;
            loads.transactions.world.fault(fault.name());
        }
        round += 1;
    }
    loads.transactions.goes_on(BETWEEN).await
}

/// Whether the strict rule can fail: the standbys are cut off, the leader goes on and is lost, and a standby takes its
/// place.
pub(crate) async fn play_delayed(stage: &Stage) -> anyhow::Result<Finding> {
    let programs = match Programs::find() {
        Ok(programs) => programs,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let formation = Formation::start(programs, Replication::Asynchronous).await?;
    let mut loads = Loads::start(stage, &formation).await?;
    loads.transactions.goes_on(BETWEEN).await?;
    let receivers = formation.stop_receivers().await?;
    loads.transactions.goes_on(DELAYED).await?;
    let old = formation.leader()?;
    old.kill().await?;
    // With a receiver goes what had arrived and was not yet written.
    formation.kill_receivers(&receivers)?;
    formation.leaves(old).await?;
    loads.transactions.goes_on(BETWEEN).await?;
    loads.transactions.world.fault("leader killed -9, its standbys cut off before");
    formation.start_again(old)?;
    formation.is_whole().await?;
    loads.stop().await?;
    let (mut finding, _) = loads.check(Replication::Asynchronous).await?;
    let (strict, _) = loads.check(Replication::Strict).await?;
    let found = strict.violations.iter().filter(|said| said.contains("which is not there")).count();
    if found == 0 {
        finding.violations.push("the strict rule does not see the answers that were lost here".to_owned());
    }
    Ok(finding.note(format!("the strict rule finds {found} lost answers, as it must")))
}

/// The callers of the three modes, each mode in a database of its own.
struct Loads {
    transactions: Load,
    marks: Load,
    at_least_once: Load,
    at_most_once: Load,
}

impl Loads {
    async fn start(stage: &Stage, formation: &Formation) -> anyhow::Result<Self> {
        let load = async |way: Way, name: &str, callers: u32| {
            let options = formation.create_database(name).await?;
            let world = World::on(options, stage, name, &[]).await?;
            anyhow::Ok(Load::start(&world, way, name, callers))
        };
        let leases =
            |at_most_once| Way::Lease(Leased { at_most_once, lease: LEASE, work: 20 }, Arc::<Outside>::default());
        let marks = load(Way::Mark, "marks", 2).await?;
        let at_least_once = load(leases(false), "at-least-once", 2).await?;
        let at_most_once = load(leases(true), "at-most-once", 2).await?;
        // The last world is the one whose progress is shown.
        let transactions = load(Way::Transaction, "transactions", 6).await?;
        Ok(Self { transactions, marks, at_least_once, at_most_once })
    }

    fn all(&self) -> [&Load; 4] {
        [&self.transactions, &self.marks, &self.at_least_once, &self.at_most_once]
    }

    async fn stop(&mut self) -> anyhow::Result<()> {
        for load in [&mut self.transactions, &mut self.marks, &mut self.at_least_once, &mut self.at_most_once] {
            load.stop().await?;
        }
        Ok(())
    }

    /// Asks for every key once more, and compares all answers with the tables and with the outside. Also returns when
    /// the answers were given that are lost.
    async fn check(&self, replication: Replication) -> anyhow::Result<(Finding, Vec<Moment>)> {
        let (mut finding, mut lost) = (Finding::default(), Vec::new());
        for load in self.all() {
            let (part, gone) = check(load, replication).await?;
            finding.add(part);
            lost.extend(gone);
        }
        Ok((finding, lost))
    }
}

async fn check(load: &Load, replication: Replication) -> anyhow::Result<(Finding, Vec<Moment>)> {
    let world = &load.world;
    let before = world.history.calls();
    let decided = load.settle().await?;
    let (calls, mut after) = (world.history.calls(), world.aftermath().await?);
    // Asynchronous replication promises nothing about answers from before a failover. What is left must be whole, and
    // what is answered now must be true.
    let told = |call: &Call| replication == Replication::Strict || call.name.starts_with(SETTLER);
    let told: Vec<Call> = calls.into_iter().filter(told).collect();
    let (name, violations, gone, more) = match &load.way {
        Way::Transaction => ("transactions", checker::violations(&told, &after), lost(&before, &after), String::new()),
        Way::Mark => ("marks", mark_callers::violations(&told, &after), lost(&before, &after), String::new()),
        Way::Lease(leased, outside) => {
            after.effects = outside.effects();
            let (name, promise) = match (leased.at_most_once, replication) {
                (true, Replication::Strict) => ("leases at most once", Promise::AtMostOnce),
                // A lost claim is a second effect, which is counted.
                (true, Replication::Asynchronous) => ("leases at most once", Promise::AtLeastOnce),
                (false, _) => ("leases at least once", Promise::AtLeastOnce),
            };
            let checked = lease_checker::check(&told, &after, promise);
            let gone = lost(&before, &stored_results(&after));
            let more =
                format!(", {} keys with two effects outside, {decided} keys settled by an operator", checked.doubles);
            (name, checked.violations, gone, more)
        }
    };
    let answers = before.iter().filter(|call| call.response().is_some()).count();
    let violations = violations.into_iter().map(|said| format!("{name}, {said}")).collect();
    let note = format!("{name}: {} of {answers} answers lost ({} effects{more})", gone.len(), after.effects.len());
    let finding = Finding { operations: before.len(), faults: world.faults(), violations, ..Finding::default() };
    Ok((finding.note(note), gone))
}

/// When the answers were given that are not true any more.
fn lost(calls: &[Call], after: &Aftermath) -> Vec<Moment> {
    let keys = by_key(calls, after);
    let is_lost =
        |call: &&Call| call.response().is_some_and(|response| !keys[call.key.as_str()].has_effect_of(response));
    calls.iter().filter(is_lost).map(|call| call.ended).collect()
}
