//! Callers who leave a PREPARE TRANSACTION behind, with the claim in it, for somebody to commit or roll back.

use futures_util::future::join_all;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use tokio::time::sleep;

use crate::history::What;
use crate::stage::{Finding, Stage};
use crate::subject::{EVERY_DOOR, Request};
use crate::world::{Least, World, pool};

const CLIENTS: u32 = 6;

const LEAST: Least = &[("transaction left prepared", 5)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "prepared-transactions", LEAST).await?;
    let pool = pool(&world.options, CLIENTS);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| {
        request.door = random.of(EVERY_DOOR);
        request.reject = random.one_in(2);
    });
    let mut random = world.random("preparer");
    let mut number = 0;
    while !world.is_over() {
        number += 1;
        let request = Request::new(&world.choose_key(&mut random), &format!("preparer/{number}"));
        world.history.add(&request.call, &request.key, What::Invoked);
        let mut conn = PgConnection::connect_with(&world.options).await?;
        let mut tx = conn.begin().await?;
        let performed = world.subject.within(&mut tx, &request).await;
        let prepared = tx.execute(AssertSqlSafe(format!("prepare transaction '{number}'"))).await.is_ok();
        drop(tx);
        conn.close_hard().await?;
        if prepared && performed.is_ok() {
            world.fault("transaction left prepared");
            sleep(random.millis(5..80)).await;
            let end = if random.one_in(2) { "commit" } else { "rollback" };
            world.observer.execute(AssertSqlSafe(format!("{end} prepared '{number}'"))).await?;
        }
        // The caller has gone away long before.
        world.history.add(&request.call, &request.key, What::Unknown("prepared".to_owned()));
    }
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    Finding::of(&world).await
}
