//! Owners of a lease that are suspended past its end, and wake. Only here do two owners believe in the same claim, in
//! real processes.

use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::time::{sleep, timeout};

use crate::callers::Leased;
use crate::checker::leases::Promise;
use crate::finding::Finding;
use crate::stage::Stage;
use crate::worker::Crew;
use crate::world::{Least, World};

const WORKERS: usize = 4;

const LEAST: Least = &[("owner suspended", 5)];

pub(super) async fn play(stage: &Stage, promise: Promise) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let work = if promise == Promise::InSteps { 320 } else { 100 };
    let leased = Leased { promise, lease: Duration::from_millis(150), work };
    let mut random = world.random("suspender");
    let mut crew = Crew::start(&world, &world.options, WORKERS, Some(leased))?;
    sleep(Duration::from_millis(200)).await;
    while !world.is_over() {
        sleep(random.millis(5..40)).await;
        crew.must_be_alive()?;
        // Two of them, so that one may wake while its successor is suspended.
        let first = random.below(crew.len());
        let second = (first + 1 + random.below(crew.len() - 1)) % crew.len();
        let suspend = |worker| crew.suspend(worker, suspension(&world, random.millis(100..400), !random.one_in(3)));
        try_join_all([first, second].map(suspend)).await?;
        (0..2).for_each(|_| world.fault("owner suspended"));
    }
    crew.finding().await
}

/// The time of a suspension: at times shorter than the lease, and often until the next attempt has just begun. Then the
/// owner can do the most harm.
async fn suspension(world: &World, longest: Duration, aimed: bool) {
    if aimed {
        let _ = timeout(longest, another_attempt(world)).await;
    } else {
        sleep(longest).await;
    }
}

async fn another_attempt(world: &World) -> sqlx::Result<()> {
    let attempts = async || {
        let sum = "select coalesce(sum(attempt - 1), 0) from idempotency.record";
        sqlx::query_scalar::<_, i64>(sum).fetch_one(&world.observer).await
    };
    let before = attempts().await?;
    while attempts().await? == before {
        sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}
