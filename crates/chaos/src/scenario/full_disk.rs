//! The disk of the tables fills up and is freed again. Only here does any statement fail for want of space. The disk is a
//! tablespace of some megabytes in memory, mounted in a namespace of the server's own, which only root can create. The WAL
//! has room, because without it the server stops.

use std::process::{Command, Stdio};
use std::sync::Arc;

use sqlx::{AssertSqlSafe, Executor as _};
use tokio::time::sleep;

use crate::callers::{Callers, Way};
use crate::cluster::{Cluster, root};
use crate::finding::Finding;
use crate::history::What;
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
use crate::world::{Least, World, pool};

const CLIENTS: u32 = 6;
/// How long the disk is full, or free, in milliseconds.
const PHASE: std::ops::Range<u64> = 100..400;

const LEAST: Least = &[("disk filled", 2)];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    // There must be room for the rows of the callers.
    let size = 6 + 2 * stage.time.as_secs();
    let mount = format!("mount -t tmpfs -o size={size}m,mode=0777 tmpfs /mnt && install -d -m 0777 /mnt/space");
    let mut unshare = Command::new("unshare");
    let can = unshare.args(["-m", "sh", "-c", &mount]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    if !can.is_ok_and(|status| status.success()) {
        return Ok(Finding::skipped("only root can mount a small disk, and not in every container"));
    }
    let mut command = Command::new("unshare");
    let serve = format!("{mount} && chown \"$(id -un postgres 2>/dev/null || echo nobody)\" /mnt/space && exec \"$@\"");
    command.args(["-m", "sh", "-c", &serve, "serve"]).arg(root().join("script/postgres"));
    let cluster = Arc::new(Cluster::start_by(command, &[]).await?);
    let world = World::create(&stage.on(cluster), LEAST).await?;
    world.observer.execute("create tablespace space location '/mnt/space'").await?;
    for move_there in [
        "alter table idempotency.record set tablespace space",
        "alter index idempotency.record_pkey set tablespace space",
        "alter index idempotency.record_expires_at set tablespace space",
        "alter table effect set tablespace space",
    ] {
        world.observer.execute(move_there).await?;
    }
    let way = Way::Transaction(|random, request| request.door = random.of(SAFE_TO_DROP));
    let mut callers = Callers::start(&world, way, pool(&world.options, CLIENTS), "c", CLIENTS as usize);
    let mut random = world.random("filler");
    while !world.is_over() {
        world.observer.execute("create table filler (bytes text) tablespace space").await?;
        // Fills it in large pieces, and then in small ones.
        for rows in ["100", "1"] {
            let fill = format!("insert into filler select repeat('x', 1900) from generate_series(1, {rows})");
            while world.observer.execute(AssertSqlSafe(fill.as_str())).await.is_ok() {}
        }
        world.fault("disk filled");
        sleep(random.millis(PHASE)).await;
        world.observer.execute("drop table filler").await?;
        sleep(random.millis(PHASE)).await;
    }
    callers.end().await?;
    let full = world.history.calls().iter().filter(|call| is_full(&call.end)).count();
    Ok(callers.finding().await?.note(format!("{full} calls met a full disk")))
}

fn is_full(end: &What) -> bool {
    matches!(end, What::Unknown(why) if why.contains("No space left"))
}
