//! Owners of a lease that are stopped past its end, and wake.

use std::time::Duration;

use tokio::time::sleep;

use crate::lease::Leased;
use crate::stage::{Finding, Stage};
use crate::worker::Crew;
use crate::world::{Least, World};

const WORKERS: usize = 4;

const LEAST: Least = &[("owner suspended", 5)];

pub(crate) async fn play(stage: &Stage, at_most_once: bool) -> anyhow::Result<Finding> {
    let name = if at_most_once { "suspended-at-most-once" } else { "suspended-owners" };
    let world = World::create(stage, name, LEAST).await?;
    let leased = Leased { at_most_once, lease: Duration::from_millis(150), work: 100 };
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
