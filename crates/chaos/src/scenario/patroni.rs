//! Failover under Patroni: the leader changes in four ways, under load in all three modes. With strict synchronous
//! replication nothing that was acknowledged is lost; with asynchronous replication the losses are counted.

use std::time::Duration;

use tokio::time::Instant;

use crate::beside::InSteps;
use crate::callers::load::calls_of;
use crate::callers::modes::{Answers, Loads};
use crate::callers::outage::{Injected, Seen, seen};
use crate::history::now;
use crate::patroni::fault::{DIRECT_NAME, Fault};
use crate::patroni::formation::{Formation, Replication};
use crate::patroni::programs::Programs;
use crate::stage::{Finding, Stage};
use crate::world::World;

/// Answers between two faults.
const BETWEEN: u64 = 200;
/// Answers that the delayed standbys do not get before the leader is lost.
const DELAYED: u64 = 200;

/// Each fault at least twice under strict replication, and at least once under asynchronous.
pub(crate) async fn play(stage: &Stage, replication: Replication) -> anyhow::Result<Finding> {
    let programs = match Programs::find() {
        Ok(programs) => programs,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let formation = Formation::start(programs, replication).await?;
    let mut loads = start_loads(stage, &formation).await?;
    // With asynchronous replication, the mark of a text can be lost like all that was acknowledged, and the text is sent
    // twice. So nothing would be left to check.
    let steps = if replication == Replication::Strict {
        let world =
            async |stage: &Stage| World::on(formation.create_database("steps").await?, stage, "steps", &[]).await;
        Some(InSteps::on(stage, world).await?)
    } else {
        None
    };
    let least = if replication == Replication::Strict { 2 } else { 1 };
    let mut injected = Vec::new();
    let ended = inject_all(&formation, &loads, least, stage.time, &mut injected).await;
    loads.stop().await?;
    let (mut finding, lost) = loads.check(promised(replication)).await?;
    // What was lost is worth knowing also where the formation did not recover.
    if let Err(error) = ended {
        finding.violations.push(format!("not all faults were injected and survived: {error:#}"));
    }
    if let Some(steps) = steps {
        finding.add(steps.finding().await?);
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
    let mut loads = start_loads(stage, &formation).await?;
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
    let (mut finding, _) = loads.check(Answers::LostWithAFault).await?;
    let (strict, _) = loads.check(Answers::AllTrue).await?;
    let found = strict.violations.iter().filter(|said| said.contains("which is not there")).count();
    if found == 0 {
        finding.violations.push("the strict rule does not see the answers that were lost here".to_owned());
    }
    Ok(finding.note(format!("the strict rule finds {found} lost answers, as it must")))
}

async fn start_loads(stage: &Stage, formation: &Formation) -> anyhow::Result<Loads> {
    Loads::start(async |name| World::on(formation.create_database(name).await?, stage, name, &[]).await).await
}

/// Asynchronous replication promises nothing about answers from before a failover.
fn promised(replication: Replication) -> Answers {
    match replication {
        Replication::Strict => Answers::AllTrue,
        Replication::Asynchronous => Answers::LostWithAFault,
    }
}
