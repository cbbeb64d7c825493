//! Connections that are cut at COMMIT: the caller cannot know what became of it, and a repeat must.

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::proxy::{PAST_ALL_HOLES, Proxy, Trouble};
use crate::stage::{Finding, Stage};
use crate::subject::SAFE_TO_DROP;
use crate::world::{Least, World, pool};

const CLIENTS: u32 = 8;

const LEAST: Least = &[
    ("cut before COMMIT was sent", 1),
    ("cut within a message", 1),
    ("black hole before COMMIT", 1),
    ("cut after COMMIT was answered", 1),
    ("cut within the answer to COMMIT", 1),
    ("black hole after COMMIT", 1),
];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "cut-connections", LEAST).await?;
    let trouble = Trouble { commits: 8, messages: 200, latency: 0..0 };
    let proxy = Proxy::before(&world, trouble).await?;
    let pool = pool(&proxy.options, CLIENTS);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| {
        request.door = random.of(SAFE_TO_DROP);
    });
    for client in join_all(clients).await {
        client?;
    }
    drop(pool);
    sleep(PAST_ALL_HOLES).await;
    drop(proxy);
    Finding::of(&world).await
}
