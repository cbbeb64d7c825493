//! Owners of a lease that are stopped past its end, and wake.

use std::time::Duration;

use tokio::time::sleep;

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
        work: if promise == Promise::InSteps { 240 } else { 100 },
    };
    let mut random = world.random("suspender");
    let mut crew = Crew::start(&world, WORKERS, Some(leased))?;
    sleep(Duration::from_millis(200)).await;
    while !world.is_over() {
        sleep(random.millis(5..40)).await;
        crew.must_be_alive()?;
        // Shorter than the lease at times.
        crew.suspend(random.below(crew.len()), random.millis(100..400)).await?;
        world.fault("owner suspended");
    }
    crew.end().await?;
    Finding::of_leases(&world, leased).await
}
