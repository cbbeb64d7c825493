//! The server is killed and started again, under load: nothing that was acknowledged is lost.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::Connection as _;
use tokio::time::{sleep, timeout};

use crate::cluster::signal;
use crate::stage::{Finding, Stage};
use crate::subject::EVERY_DOOR;
use crate::world::{Least, World, pool_that_waits};

const CLIENTS: u32 = 6;
/// Short, for the callers to be back before the next crash.
const WAIT: Duration = Duration::from_millis(250);
/// A server that recovers from the death of a backend does so within a second.
const PATIENCE: Duration = Duration::from_secs(60);

const LEAST: Least = &[("backend killed -9", 1), ("postmaster killed -9", 1)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "killed-server", LEAST).await?;
    let options = world.options.clone().application_name("chaos-client");
    let pool = pool_that_waits(&options, CLIENTS, WAIT);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| {
        request.door = random.of(EVERY_DOOR);
    });
    let mut random = world.random("killer");
    while !world.is_over() {
        sleep(random.millis(200..700)).await;
        if random.one_in(3) {
            // The postmaster then ends all the others, and recovers by itself.
            let victim: Option<i32> = sqlx::query_scalar(
                "select pid from pg_stat_activity where application_name = 'chaos-client' order by random() limit 1",
            )
            .fetch_optional(&world.observer)
            .await?;
            if let Some(victim) = victim {
                signal("-KILL", u32::try_from(victim)?)?;
                world.fault("backend killed -9");
                timeout(PATIENCE, recovered(&world)).await?;
            }
        } else {
            stage.cluster.kill()?;
            stage.cluster.start_again().await?;
            world.fault("postmaster killed -9");
        }
    }
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    Finding::of(&world).await
}

async fn recovered(world: &World) {
    loop {
        sleep(Duration::from_millis(50)).await;
        if let Ok(conn) = sqlx::PgConnection::connect_with(&world.options).await {
            let _ = conn.close().await;
            return;
        }
    }
}
