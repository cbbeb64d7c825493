//! Many callers of one key, a pool that is far too small for them, and somebody who leaves open transactions in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use sqlx::Executor as _;
use tokio::time::sleep;

use crate::stage::{Finding, Stage};
use crate::subject::SAFE_TO_DROP;
use crate::world::{Least, World, pool};

const CLIENTS: u64 = 24;
const CONNECTIONS: u32 = 6;

const LEAST: Least = &[("transaction leaked", 5)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "duplicate-storm", LEAST).await?;
    let pool = pool(&world.options, CONNECTIONS);
    let asked = Arc::new(AtomicU64::new(0));
    let mut clients = world.crowd(&pool, CLIENTS, move |random, request| {
        // One key for all, until each has asked for it about once.
        request.key = format!("s{}", asked.fetch_add(1, Ordering::Relaxed) / CLIENTS);
        request.door = random.of(SAFE_TO_DROP);
        request.reject = random.one_in(4);
    });
    clients.push(tokio::spawn({
        let (world, pool) = (world.clone(), pool.clone());
        async move {
            let mut random = world.random("leaker");
            while !world.is_over() {
                sleep(random.millis(20..100)).await;
                if let Ok(mut conn) = pool.acquire().await
                    && conn.execute(sqlx::raw_sql("begin; insert into leaked values ('leaked')")).await.is_ok()
                {
                    world.fault("transaction leaked");
                }
            }
        }
    }));
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    let mut finding = Finding::of(&world).await?;
    let leaked: i64 = sqlx::query_scalar("select count(*) from leaked").fetch_one(&world.observer).await?;
    if leaked > 0 {
        finding.violations.push(format!("{leaked} transactions of somebody else's were committed"));
    }
    Ok(finding)
}
