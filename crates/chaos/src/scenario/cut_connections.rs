//! A caller whose connection is cut at COMMIT cannot know the result, and its repeat gets the answer. Only here does
//! the network lose a COMMIT, or the answer to it, under load.

use tokio::time::sleep;

use crate::callers::{Callers, Way};
use crate::finding::Finding;
use crate::proxy::{PAST_ALL_HOLES, Proxy};
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
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

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let proxy = Proxy::before(&world).await?;
    let way = Way::Transaction(|random, request| request.enter(random, SAFE_TO_DROP));
    let mut callers = Callers::start(&world, way, pool(&proxy.options, CLIENTS), "c", CLIENTS as usize);
    callers.end().await?;
    sleep(PAST_ALL_HOLES).await;
    drop(proxy);
    callers.finding().await
}
