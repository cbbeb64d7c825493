//! The primary is lost, and its standby promoted: synchronous, nothing that was acknowledged is lost; asynchronous, it
//! is counted.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;

use crate::checker::{lost, violations};
use crate::pair::Pair;
use crate::stage::{Finding, Stage};
use crate::subject::SAFE_TO_DROP;
use crate::world::{World, pool};

const CLIENTS: u32 = 6;
/// How long the two are separated before the primary is lost.
const SEPARATED: Duration = Duration::from_millis(250);

pub(crate) async fn play(stage: &Stage, synchronous: bool) -> anyhow::Result<Finding> {
    let name = if synchronous { "promoted-standby" } else { "promoted-async-standby" };
    let pair = Pair::start(synchronous).await?;
    let world = World::on(pair.primary.create_database(name).await?, stage, name, &[]).await?;
    let pool = pool(&world.options, CLIENTS);
    let clients = world.crowd(&pool, CLIENTS.into(), |random, request| request.door = random.of(SAFE_TO_DROP));
    world.nearly_over(SEPARATED).await;
    let receiver = pair.separate().await?;
    sleep(SEPARATED).await;
    pair.promote(receiver).await?;
    world.fault("primary killed -9, standby promoted");
    for client in &clients {
        client.abort();
    }
    join_all(clients).await;
    let world = world.moved(pair.standby.options().database(name));
    stage.show(&world);
    let (calls, after) = (world.history.calls(), world.aftermath().await?);
    let answered = calls.iter().filter(|call| call.response().is_some()).count();
    let counted = format!("{} of {answered} answers lost", lost(&calls, &after));
    let finding = if synchronous {
        Finding::of(&world).await?
    } else {
        world.settle().await?;
        // What is left must still be whole, whatever was said before.
        Finding::with(&world, violations(&[], &world.aftermath().await?))
    };
    Ok(finding.note(counted))
}
