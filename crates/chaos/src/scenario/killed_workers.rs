//! Worker processes that are killed without a word, at any moment of a call.

use tokio::time::sleep;

use crate::stage::{Finding, Stage};
use crate::worker::Crew;
use crate::world::{Least, World};

const WORKERS: usize = 4;

const LEAST: Least = &[("worker killed", 10)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "killed-workers", LEAST).await?;
    let mut random = world.random("killer");
    let mut crew = Crew::start(&world, WORKERS, None)?;
    while !world.is_over() {
        // A worker lives for some four of these, and needs most of one to connect.
        sleep(random.millis(10..60)).await;
        crew.must_be_alive()?;
        crew.kill(random.below(crew.len())).await?;
        world.fault("worker killed");
    }
    crew.end().await?;
    Finding::of(&world).await
}
