//! Set-ups that promise nothing across a crash: what they lose is counted, and `operator::health` must have warned.

use std::time::Duration;

use futures_util::future::join_all;
use pg_idempotency::operator::{Warning, health};
use sqlx::{AssertSqlSafe, Executor as _};

use crate::checker::{lost, violations};
use crate::stage::{Finding, Stage};
use crate::subject::SAFE_TO_DROP;
use crate::world::{World, pool};

const CLIENTS: u32 = 6;

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let half = stage.part(&stage.cluster, stage.time / 2);
    let asynchronous = "alter database \"asynchronous-commit\" set synchronous_commit = off";
    let mut finding = crash(&half, "asynchronous-commit", asynchronous, Warning::SynchronousCommitOff).await?;
    let unlogged = "alter table idempotency.record set unlogged; alter table effect set unlogged";
    finding.add(crash(&half, "unlogged-tables", unlogged, Warning::Unlogged).await?);
    Ok(finding)
}

async fn crash(stage: &Stage, name: &'static str, weaken: &'static str, expected: Warning) -> anyhow::Result<Finding> {
    let world = World::create(stage, name, &[]).await?;
    world.observer.execute(AssertSqlSafe(weaken)).await?;
    let pool = pool(&world.options, CLIENTS);
    let warned = health(&pool, Duration::from_secs(3600)).await?.contains(&expected);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| request.door = random.of(SAFE_TO_DROP));
    world.nearly_over(Duration::ZERO).await;
    stage.cluster.kill()?;
    stage.cluster.start_again().await?;
    world.fault("postmaster killed -9");
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    let (calls, after) = (world.history.calls(), world.aftermath().await?);
    let answered = calls.iter().filter(|call| call.response().is_some()).count();
    let counted = format!("{name}: {} of {answered} answers lost", lost(&calls, &after));
    world.settle().await?;
    // What is left must still be whole, whatever was said before.
    let mut violations = violations(&[], &world.aftermath().await?);
    if !warned {
        violations.push(format!("{name}: operator::health did not warn"));
    }
    Ok(Finding::with(&world, violations).note(counted))
}
