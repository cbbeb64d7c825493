//! The server is killed and started again, and backends are ended and cancelled, under load. Only here does a server
//! recover from a crash: nothing that was acknowledged is lost, and no step outside happens twice.

use std::time::Duration;

use sqlx::PgPool;
use tokio::time::{sleep, timeout};

use crate::callers::{Callers, Leased, Way};
use crate::checker::leases::Promise;
use crate::cluster::{Cluster, signal};
use crate::finding::Finding;
use crate::request::EVERY_DOOR;
use crate::stage::Stage;
use crate::world::{Least, World, outside, pool_that_waits};

const CLIENTS: u32 = 6;
/// Short, for the callers to be back before the next crash.
const WAIT: Duration = Duration::from_millis(250);
/// The number of backends that are ended or cancelled between two crashes.
const HITS: u64 = 40;
/// Chooses one of the callers' backends. An idle one has no statement to cancel.
const VICTIM: &str = "
    select pid from pg_stat_activity where application_name = 'chaos-client' and (state <> 'idle' or $1)
    order by random() limit 1";

/// Slow, so that a kill comes before the end of the step also on a busy machine.
const SLOW: Leased = Leased { promise: Promise::InSteps, lease: Duration::from_millis(400), work: 300 };
/// Longer than the time to the next text, most of the time.
const SOON: Duration = Duration::from_millis(600);

const LEAST: Least =
    &[("backend killed -9", 1), ("postmaster killed -9", 1), ("backend terminated", 3), ("statement cancelled", 3)];
const LEAST_IN_STEPS: Least = &[("postmaster killed -9", 2)];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let options = world.options.clone().application_name("chaos-client");
    let way = Way::Transaction(|random, request| {
        request.enter(random, EVERY_DOOR);
        request.reject = random.one_in(4);
    });
    let callers = Callers::start(&world, way, pool_that_waits(&options, CLIENTS, WAIT), "c", CLIENTS as usize);
    let mut random = world.random("killer");
    while !world.is_over() {
        for _ in 0..HITS {
            sleep(random.millis(2..20)).await;
            let (fault, function) = if random.one_in(2) {
                ("backend terminated", "select pg_terminate_backend($1)")
            } else {
                ("statement cancelled", "select pg_cancel_backend($1)")
            };
            if let Some(victim) = victim(&world, fault == "backend terminated").await? {
                sqlx::query(function).bind(victim).execute(&world.observer).await?;
                world.fault(fault);
            }
        }
        if !random.one_in(3) {
            stage.cluster.kill()?;
            stage.cluster.start_again().await?;
            world.fault("postmaster killed -9");
        } else if let Some(victim) = victim(&world, true).await? {
            // The backend may have ended by itself meanwhile. Otherwise the postmaster ends all other backends, and
            // recovers by itself.
            if signal("-KILL", u32::try_from(victim)?).is_ok() {
                world.fault("backend killed -9");
                sleep(Duration::from_millis(50)).await;
                stage.cluster.answers().await?;
            }
        }
    }
    callers.finding().await
}

async fn victim(world: &World, idle: bool) -> sqlx::Result<Option<i32>> {
    sqlx::query_scalar(VICTIM).bind(idle).fetch_optional(&world.observer).await
}

/// Operations in steps with one caller, because every COMMIT of another one would also write a mark that is not yet on
/// disk, and so hide it. The outside is on another server for the same reason.
pub(super) async fn play_steps(stage: &Stage) -> anyhow::Result<Finding> {
    let gateway = Cluster::start(&[]).await?;
    let outside = outside(&gateway.create_database("outside").await?).await?;
    let world = World::create(stage, &[]).await?.beside(LEAST_IN_STEPS, Some(outside.clone()));
    let callers = Callers::start(&world, Way::Lease(SLOW), pool_that_waits(&world.options, 12, WAIT), "steps", 1);
    let mut random = world.random("killer");
    while !world.is_over() {
        sleep(random.millis(20..100)).await;
        // The worst moment: something has happened outside, and its result is not stored.
        let _ = timeout(SOON, another_text(&outside)).await;
        stage.cluster.kill()?;
        stage.cluster.start_again().await?;
        world.fault("postmaster killed -9");
    }
    callers.finding().await
}

async fn another_text(outside: &PgPool) -> sqlx::Result<()> {
    let texts = async || sqlx::query_scalar("select count(*) from part where step = 'text'").fetch_one(outside).await;
    let before: i64 = texts().await?;
    while texts().await? == before {
        sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}
