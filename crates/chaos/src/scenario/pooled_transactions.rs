//! Through PgBouncer in transaction mode, with prepared statements off, while its server connections are terminated.

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::pooler::{Pooler, binary};
use crate::stage::{Finding, Stage};
use crate::subject::EVERY_DOOR;
use crate::world::{Least, World, pool};

const CLIENTS: u32 = 10;

const LEAST: Least = &[("backend terminated", 5)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let Some(binary) = binary() else {
        return Ok(Finding::skipped("script/find-server gives no pgbouncer"));
    };
    let world = World::create(stage, "pooled-transactions", LEAST).await?;
    let pooler = Pooler::before(&world.options, &binary).await?;
    let pool = pool(&pooler.options, CLIENTS);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| {
        request.door = random.of(EVERY_DOOR);
        request.reject = random.one_in(4);
        request.prepared = false;
    });
    let mut random = world.random("killer");
    while !world.is_over() {
        sleep(random.millis(20..120)).await;
        let hit: i64 = sqlx::query_scalar(
            "select count(pg_terminate_backend(pid)) from (
                select pid from pg_stat_activity
                where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'
                order by random() limit 1
            ) as victim",
        )
        .fetch_one(&world.observer)
        .await?;
        if hit > 0 {
            world.fault("backend terminated");
        }
    }
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    Finding::of(&world).await
}
