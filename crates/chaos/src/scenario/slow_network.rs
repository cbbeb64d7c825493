//! Every message takes its time.

use futures_util::future::join_all;

use crate::proxy::{Proxy, slow};
use crate::stage::{Finding, Stage};
use crate::subject::EVERY_DOOR;
use crate::world::{World, pool};

const CLIENTS: u32 = 12;

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "slow-network", &[]).await?;
    let proxy = Proxy::before(&world, slow(1..12)).await?;
    let pool = pool(&proxy.options, CLIENTS);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| {
        request.door = random.of(EVERY_DOOR);
        request.reject = random.one_in(4);
    });
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    Ok(Finding::of(&world).await?.note("1 to 11 ms for each message, in each direction"))
}
