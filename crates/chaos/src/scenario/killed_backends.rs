//! Backends that are terminated, and statements that are cancelled, at any moment of a call.

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::stage::{Finding, Stage};
use crate::subject::EVERY_DOOR;
use crate::world::{Least, World, pool};

const CLIENTS: u32 = 6;

const LEAST: Least = &[("backend terminated", 10), ("statement cancelled", 10)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "killed-backends", LEAST).await?;
    let pool = pool(&world.options.clone().application_name("chaos-client"), CLIENTS);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| {
        request.door = random.of(EVERY_DOOR);
        request.reject = random.one_in(4);
    });
    let mut random = world.random("killer");
    while !world.is_over() {
        sleep(random.millis(2..20)).await;
        let (fault, sql) = if random.one_in(2) {
            (
                "backend terminated",
                "select count(pg_terminate_backend(pid)) from (select pid from pg_stat_activity where application_name = 'chaos-client' order by random() limit 1) as victim",
            )
        } else {
            (
                "statement cancelled",
                "select count(pg_cancel_backend(pid)) from (select pid from pg_stat_activity where application_name = 'chaos-client' and state = 'active' order by random() limit 1) as victim",
            )
        };
        let hit: i64 = sqlx::query_scalar(sql).fetch_one(&world.observer).await?;
        if hit > 0 {
            world.fault(fault);
        }
    }
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    Finding::of(&world).await
}
