//! Owners of a lease that are killed: between claim and effect, between effect and completion, anywhere.

use std::time::Duration;

use tokio::time::sleep;

use crate::lease::Leased;
use crate::lease_checker::Promise;
use crate::stage::{Finding, Stage};
use crate::stepped::create_tables;
use crate::worker::Crew;
use crate::world::{Least, World};

const WORKERS: usize = 4;

const LEAST: Least = &[("worker killed", 10)];

pub(crate) async fn play(stage: &Stage, promise: Promise) -> anyhow::Result<Finding> {
    let name = match promise {
        Promise::AtLeastOnce => "killed-leases",
        Promise::AtMostOnce => "killed-leases-at-most-once",
        Promise::InSteps => "killed-steps",
    };
    let world = World::create(stage, name, LEAST).await?;
    if promise == Promise::InSteps {
        create_tables(&world).await?;
    }
    let leased = Leased { promise, lease: Duration::from_millis(150), work: 60 };
    let mut random = world.random("killer");
    let mut crew = Crew::start(&world, WORKERS, Some(leased))?;
    while !world.is_over() {
        sleep(random.millis(10..60)).await;
        crew.must_be_alive()?;
        crew.kill(random.below(crew.len())).await?;
        world.fault("worker killed");
    }
    crew.end().await?;
    Finding::of_leases(&world, leased).await
}
