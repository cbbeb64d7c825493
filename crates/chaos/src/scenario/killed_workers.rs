//! Worker processes that are killed with SIGKILL, at any moment of a call. Only here does the process of a caller end,
//! in transaction mode, with leases under each promise, and with operations in steps. With both doors, connections are
//! cut, too: only there do callers of the library and of the SQL functions meet what the others have left.

use std::ops::Range;
use std::time::Duration;

use tokio::time::sleep;

use crate::callers::Leased;
use crate::checker::leases::Promise;
use crate::finding::Finding;
use crate::history::{Call, What};
use crate::proxy::Proxy;
use crate::request::{KEYS_OF_BOTH_DOORS, THROUGH_SQL};
use crate::stage::Stage;
use crate::worker::Crew;
use crate::world::{Least, Setup, World};

const WORKERS: usize = 4;

const LEAST: Least = &[("worker killed", 10)];
const LEAST_OF_BOTH_DOORS: Least = &[
    ("worker killed", 10),
    ("cut before COMMIT was sent", 1),
    ("cut within a message", 1),
    ("cut after COMMIT was answered", 1),
    ("black hole after COMMIT", 1),
];

/// Without a promise, the workers call in transaction mode.
pub(super) async fn play(stage: &Stage, promise: Option<Promise>) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let leased = promise.map(|promise| Leased { promise, lease: Duration::from_millis(150), work: 60 });
    let crew = Crew::start(&world, &world.options, WORKERS, leased)?;
    // A worker lives for some four of these pauses, and needs most of one to connect.
    kill(&world, crew, 10..60).await
}

/// The library and the SQL functions on the same keys.
pub(super) async fn play_both_doors(stage: &Stage) -> anyhow::Result<Finding> {
    let options = stage.cluster.create_database(stage.name).await?;
    let setup = Setup { least: LEAST_OF_BOTH_DOORS, prefix: Some(KEYS_OF_BOTH_DOORS), ..Setup::default() };
    let world = World::on(options, stage, setup).await?;
    let proxy = Proxy::before(&world).await?;
    let crew = Crew::start(&world, &proxy.options, WORKERS, None)?;
    let mut finding = kill(&world, crew, 50..200).await?;
    let is_sql = |call: &str| call.ends_with(THROUGH_SQL);
    let shared = |call: &Call| matches!(&call.end, What::Replayed(first) if is_sql(first) != is_sql(&call.name));
    let [sql, library] = [true, false]
        .map(|sql| world.history.calls().iter().filter(|call| is_sql(&call.name) == sql && shared(call)).count());
    if stage.mutant.is_none() && (sql == 0 || library == 0) {
        finding.violations.push("a door has replayed nothing that the other one had stored".to_owned());
    }
    let replays =
        format!("replays of what the other door had stored: {sql} through SQL, {library} through the library");
    Ok(finding.note(replays))
}

async fn kill(world: &World, mut crew: Crew, pauses: Range<u64>) -> anyhow::Result<Finding> {
    let mut random = world.random("killer");
    while !world.is_over() {
        sleep(random.millis(pauses.clone())).await;
        crew.kill(random.below(crew.len())).await?;
        world.fault("worker killed");
    }
    crew.finding().await
}
