//! Set-ups that promise nothing across a crash: `operator::health` warns, the losses are counted, and the remaining
//! effects and records still agree. No other place measures these losses.

use std::time::Duration;

use pg_idempotency::operator::{Warning, health};
use sqlx::{AssertSqlSafe, Executor as _};

use crate::callers::{Answers, Callers, Way};
use crate::finding::Finding;
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
use crate::world::{World, pool};

const CLIENTS: u32 = 6;

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let (name, half) = (stage.name, stage.half());
    let asynchronous = format!("alter database \"{name}\" set synchronous_commit = off");
    let mut finding = crash(&half, "synchronous_commit = off", asynchronous, Warning::SynchronousCommitOff).await?;
    let unlogged = "alter table idempotency.record set unlogged; alter table effect set unlogged".to_owned();
    finding.add(crash(&half, "unlogged tables", unlogged, Warning::Unlogged).await?);
    Ok(finding)
}

async fn crash(stage: &Stage, name: &str, weaken: String, expected: Warning) -> anyhow::Result<Finding> {
    let world = World::create(stage, &[]).await?;
    world.observer.execute(AssertSqlSafe(weaken)).await?;
    let pool = pool(&world.options, CLIENTS);
    let warned = health(&pool, Duration::from_secs(3600)).await?.contains(&expected);
    let way = Way::Transaction(|random, request| request.door = random.of(SAFE_TO_DROP));
    let mut callers = Callers::start(&world, way, pool, "c", CLIENTS as usize);
    world.over().await;
    stage.cluster.kill()?;
    stage.cluster.start_again().await?;
    world.fault("postmaster killed -9");
    callers.end().await?;
    let (mut finding, lost) = callers.check(Answers::AfterTheFault).await?;
    if !warned {
        finding.violations.push(format!("{name}: operator::health did not warn"));
    }
    Ok(finding.note(format!("{name}: {lost}")))
}
