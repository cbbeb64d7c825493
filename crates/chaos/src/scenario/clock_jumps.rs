//! The server's clock jumps by an hour, forward and back: every lease lapses at once, or none does for an hour. Only
//! here does the server's time jump. Needs libfaketime.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use pg_idempotency::chrono::NaiveDateTime;
use tokio::time::sleep;

use crate::callers::{Callers, Leased, Way};
use crate::checker::leases::Promise;
use crate::cluster::{Cluster, root};
use crate::finding::Finding;
use crate::request::EVERY_DOOR;
use crate::stage::Stage;
use crate::world::{Least, World, pool};

const CLIENTS: usize = 6;
const LEASED: Leased = Leased { promise: Promise::AtLeastOnce, lease: Duration::from_secs(30), work: 30 };
const JUMPS: &[&str] = &["+0", "+1h", "-1h"];
/// Past all leases that were claimed at any of these times.
const AFTER_ALL: &str = "+3h";

const LEAST: Least = &[("clock set", 5)];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let found = Command::new(root().join("script/find-libfaketime")).stderr(Stdio::null()).output()?;
    if !found.status.success() {
        return Ok(Finding::skipped("script/find-libfaketime gives none"));
    }
    let library = String::from_utf8(found.stdout)?;
    // The server finds the file in its data directory.
    let environment = [
        ("PG_PRELOAD", library.trim_end_matches('\n')),
        ("FAKETIME_TIMESTAMP_FILE", "clock"),
        ("FAKETIME_NO_CACHE", "1"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("FAKETIME_DISABLE_SHM", "1"),
    ];
    let cluster = Arc::new(Cluster::start(&environment).await?);
    let clock = cluster.data().join("clock");
    let half = Stage { cluster, time: stage.time / 2, ..stage.clone() };

    let world = World::create(&half, LEAST).await?;
    let way = Way::Transaction(|random, request| request.enter(random, EVERY_DOOR));
    let callers = Callers::start(&world, way, pool(&world.options, 6), "c", CLIENTS);
    let mut finding = jump(&clock, callers).await?;

    let world = World::create(&half, LEAST).await?;
    let steps = Callers::in_steps_beside(&world);
    let callers = Callers::start(&world, Way::Lease(LEASED), pool(&world.options, 6), "owner", CLIENTS);
    finding.add(jump(&clock, callers).await?);
    finding.add(steps.finding().await?);
    Ok(finding)
}

async fn jump(clock: &Path, mut callers: Callers) -> anyhow::Result<Finding> {
    let world = callers.world.clone();
    set(clock, "+0")?;
    let before = local_time(&world).await?;
    set(clock, "+1h")?;
    let jumped = local_time(&world).await? - before;
    anyhow::ensure!(jumped.num_minutes() >= 59, "libfaketime has no hold on the server: its clock went on by {jumped}");
    let mut random = world.random("clock");
    while !world.is_over() {
        set(clock, random.of(JUMPS))?;
        world.fault("clock set");
        sleep(random.millis(40..200)).await;
        end_sleeps(&world).await?;
    }
    callers.end().await?;
    set(clock, AFTER_ALL)?;
    callers.finding().await
}

async fn local_time(world: &World) -> sqlx::Result<NaiveDateTime> {
    sqlx::query_scalar("select clock_timestamp() at time zone 'utc'").fetch_one(&world.observer).await
}

/// Does what an operator has to do after the clock was set back. If a call pauses at this moment, its `pg_sleep` of
/// 10 ms lasts until the clock shows the old time again.
async fn end_sleeps(world: &World) -> sqlx::Result<()> {
    sqlx::query("select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'PgSleep'")
        .execute(&world.observer)
        .await
        .map(drop)
}

/// Replaces the file by a rename, because libfaketime must never read it half-written.
fn set(clock: &Path, time: &str) -> anyhow::Result<()> {
    let new = clock.with_extension("new");
    std::fs::write(&new, time)?;
    // The server may run as another user, whatever the umask of this one is.
    std::fs::set_permissions(&new, Permissions::from_mode(0o644))?;
    Ok(std::fs::rename(new, clock)?)
}
