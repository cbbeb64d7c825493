//! Worker processes that are killed with SIGKILL, at any moment of a call. Only here does the process of a caller end, in
//! transaction mode, with leases under each promise, and with operations in steps.

use std::time::Duration;

use tokio::time::sleep;

use crate::callers::Leased;
use crate::checker::leases::Promise;
use crate::finding::Finding;
use crate::stage::Stage;
use crate::worker::Crew;
use crate::world::{Least, World};

const WORKERS: usize = 4;

const LEAST: Least = &[("worker killed", 10)];

/// Without a promise, the workers call in transaction mode.
pub(super) async fn play(stage: &Stage, promise: Option<Promise>) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let leased = promise.map(|promise| Leased { promise, lease: Duration::from_millis(150), work: 60 });
    let mut random = world.random("killer");
    let mut crew = Crew::start(&world, WORKERS, leased)?;
    while !world.is_over() {
        // A worker lives for some four of these pauses, and needs most of one to connect.
        sleep(random.millis(10..60)).await;
        crew.kill(random.below(crew.len())).await?;
        world.fault("worker killed");
    }
    crew.finding().await
}
