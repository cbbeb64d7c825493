//! The server is killed and started again, under load: nothing that was acknowledged is lost, and no step outside
//! happens twice.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{Connection as _, PgPool};
use tokio::time::{sleep, timeout};

use crate::beside::{InSteps, LEASED};
use crate::cluster::{Cluster, signal};
use crate::lease::Leased;
use crate::stage::{Finding, Stage};
use crate::subject::EVERY_DOOR;
use crate::world::{Least, World, pool, pool_that_waits};

const CLIENTS: u32 = 6;
/// Short, for the callers to be back before the next crash.
const WAIT: Duration = Duration::from_millis(250);
/// A server that recovers from the death of a backend does so within a second.
const PATIENCE: Duration = Duration::from_secs(60);

/// So slow that a kill comes before the end of the step, on a busy machine too.
const SLOW: Leased = Leased { work: 300, ..LEASED };
/// Until the next text, most of the time.
const SOON: Duration = Duration::from_millis(600);

const LEAST_IN_STEPS: Least = &[("postmaster killed -9", 2)];
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

/// One caller of operations in steps: every COMMIT also writes what others have left unwritten, and so hides a mark that
/// was not. The outside is on another server, for the same reason.
pub(crate) async fn play_steps(stage: &Stage) -> anyhow::Result<Finding> {
    let gateway = Cluster::start(&[]).await?;
    let world = World::create(stage, "killed-server-steps", &[]).await?;
    let outside = pool(&gateway.create_database("outside").await?, 8);
    let steps = InSteps::start(world.beside(LEAST_IN_STEPS, Some(outside.clone())), 1, SLOW).await?;
    stage.show(&steps.world);
    let mut random = world.random("killer");
    while !steps.world.is_over() {
        sleep(random.millis(20..100)).await;
        // The worst moment: something has happened outside, and its result is not stored.
        let _ = timeout(SOON, another_text(&outside)).await;
        stage.cluster.kill()?;
        stage.cluster.start_again().await?;
        steps.world.fault("postmaster killed -9");
    }
    let finding = steps.finding().await;
    outside.close().await;
    finding
}

async fn another_text(outside: &PgPool) -> sqlx::Result<()> {
    let texts = async || sqlx::query_scalar("select count(*) from part where step = 'text'").fetch_one(outside).await;
    let before: i64 = texts().await?;
    while texts().await? == before {
        sleep(Duration::from_millis(1)).await;
    }
    Ok(())
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
