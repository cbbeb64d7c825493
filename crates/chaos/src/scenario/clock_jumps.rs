//! The server's clock jumps by an hour, forth and back: every lease lapses at once, or none does for an hour. Needs
//! libfaketime.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::beside::InSteps;
use crate::cluster::{Cluster, root};
use crate::lease::{self, Leased};
use crate::lease_checker::Promise;
use crate::stage::{Finding, Stage};
use crate::subject::EVERY_DOOR;
use crate::world::{Least, World, pool};

const CLIENTS: usize = 6;
const LEASED: Leased = Leased { promise: Promise::AtLeastOnce, lease: Duration::from_secs(30), work: 30 };
const JUMPS: &[&str] = &["+0", "+1h", "-1h"];
/// Past all leases that were claimed at any of these.
const AFTER_ALL: &str = "+3h";

const LEAST: Least = &[("clock set", 5)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let found = Command::new(root().join("script/find-libfaketime")).stderr(Stdio::null()).output()?;
    if !found.status.success() {
        return Ok(Finding::skipped("script/find-libfaketime gives none"));
    }
    let library = String::from_utf8(found.stdout)?;
    // The server works in its data directory, and finds the file there.
    let environment = [
        ("PG_PRELOAD", library.trim_end_matches('\n')),
        ("FAKETIME_TIMESTAMP_FILE", "clock"),
        ("FAKETIME_NO_CACHE", "1"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("FAKETIME_DISABLE_SHM", "1"),
    ];
    let cluster = Arc::new(Cluster::start(&environment).await?);
    let clock = cluster.data().join("clock");
    let half = stage.part(&cluster, stage.time / 2);

    let world = World::create(&half, "clock-jumps", LEAST).await?;
    stage.show(&world);
    let callers = pool(&world.options, 6);
    let clients = world.crowd(&callers, CLIENTS as u64, |random, request| request.door = random.of(EVERY_DOOR));
    jump(&world, &clock, clients).await?;
    callers.close().await;
    let mut finding = Finding::of(&world).await?;

    let world = World::create(&half, "clock-jumps-leases", LEAST).await?;
    stage.show(&world);
    let callers = pool(&world.options, 6);
    let steps = InSteps::beside(&world).await?;
    jump(&world, &clock, lease::crowd(&world, &callers, "owner", CLIENTS, LEASED)).await?;
    callers.close().await;
    finding.add(Finding::of_leases(&world, LEASED).await?);
    finding.add(steps.finding().await?);
    Ok(finding)
}

async fn jump(world: &World, clock: &Path, tasks: Vec<JoinHandle<()>>) -> anyhow::Result<()> {
    set(clock, "+0")?;
    let before: pg_idempotency::chrono::NaiveDateTime = local_time(world).await?;
    set(clock, "+1h")?;
    let jumped = local_time(world).await? - before;
    anyhow::ensure!(jumped.num_minutes() >= 59, "libfaketime has no hold on the server: its clock went on by {jumped}");
    let mut random = world.random("clock");
    while !world.is_over() {
        set(clock, random.of(JUMPS))?;
        world.fault("clock set");
        sleep(random.millis(40..200)).await;
    }
    for task in join_all(tasks).await {
        task?;
    }
    set(clock, AFTER_ALL)
}

async fn local_time(world: &World) -> sqlx::Result<pg_idempotency::chrono::NaiveDateTime> {
    sqlx::query_scalar("select clock_timestamp() at time zone 'utc'").fetch_one(&world.observer).await
}

/// In one step: a file that is empty for a moment is no time at all.
fn set(clock: &Path, time: &str) -> anyhow::Result<()> {
    let new = clock.with_extension("new");
    std::fs::write(&new, time)?;
    // The server may be another user's, whatever the umask of this one.
    std::fs::set_permissions(&new, Permissions::from_mode(0o644))?;
    Ok(std::fs::rename(new, clock)?)
}
