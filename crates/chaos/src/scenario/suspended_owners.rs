//! Owners of a lease that are stopped past its end, and wake.

use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::time::{sleep, timeout};

use crate::lease::Leased;
use crate::lease_checker::Promise;
use crate::stage::{Finding, Stage};
use crate::stepped::create_tables;
use crate::worker::Crew;
use crate::world::{Least, World};

const WORKERS: usize = 4;

const LEAST: Least = &[("owner suspended", 5)];

pub(crate) async fn play(stage: &Stage, promise: Promise) -> anyhow::Result<Finding> {
    let name = match promise {
        Promise::AtLeastOnce => "suspended-owners",
        Promise::AtMostOnce => "suspended-at-most-once",
        Promise::InSteps => "suspended-steps",
    };
    let world = World::create(stage, name, LEAST).await?;
    if promise == Promise::InSteps {
        create_tables(&world).await?;
    }
    let leased = Leased {
        promise,
        lease: Duration::from_millis(150),
        work: if promise == Promise::InSteps { 320 } else { 100 },
    };
    let mut random = world.random("suspender");
    let mut crew = Crew::start(&world, WORKERS, Some(leased))?;
    sleep(Duration::from_millis(200)).await;
    while !world.is_over() {
        sleep(random.millis(5..40)).await;
        crew.must_be_alive()?;
        // Two, so that one may wake while its successor is suspended.
        let first = random.below(crew.len());
        let second = (first + 1 + random.below(crew.len() - 1)) % crew.len();
        let suspend = |worker| crew.suspend(worker, suspension(&world, random.millis(100..400), !random.one_in(3)));
        try_join_all([first, second].map(suspend)).await?;
        (0..2).for_each(|_| world.fault("owner suspended"));
    }
    crew.end().await?;
    Finding::of_leases(&world, leased).await
}

/// How long an owner is suspended: shorter than the lease at times, and often until the next attempt has just begun. It
/// can do the most harm then.
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
