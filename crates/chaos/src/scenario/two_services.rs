//! Two services with the same route in one database, whose client sends one key to both. Only here do records of other
//! operations have the same scope and value, and do a resumer and an operator see the operations of another service.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::sleep;

use crate::callers::Leased;
use crate::checker::leases::Promise;
use crate::finding::Finding;
use crate::stage::Stage;
use crate::worker::Crew;
use crate::world::{Least, World};

const SERVICES: [&str; 2] = ["orders", "billing"];

const LEAST: Least = &[("worker killed", 5)];

/// Without a promise, the requests go through the layer of each service, in transaction mode.
pub(super) async fn play(stage: &Stage, promise: Option<Promise>) -> anyhow::Result<Finding> {
    let database = World::create(stage, &[]).await?;
    let leased = promise.map(|promise| Leased { promise, lease: Duration::from_millis(150), work: 60 });
    let mut services = Vec::new();
    for name in SERVICES {
        let world = database.of_service(name, LEAST).await?;
        let crew = Crew::start(&world, &world.options, 1, leased)?;
        services.push((world, crew));
    }
    let mut random = database.random("killer");
    while services.iter().any(|(world, _)| !world.is_over()) {
        sleep(random.millis(40..160)).await;
        let victim = usize::try_from(random.below(SERVICES.len() as u64))?;
        let (world, crew) = &mut services[victim];
        crew.kill(0).await?;
        world.fault("worker killed");
    }
    let mut finding = Finding::default();
    let mut asked: Vec<HashSet<String>> = Vec::new();
    for (world, crew) in services {
        finding.add(crew.finding().await?);
        asked.push(world.history.calls().into_iter().map(|call| call.key).collect());
    }
    let shared = asked[0].intersection(&asked[1]).count();
    if shared == 0 {
        finding.violations.push("no key was sent to both services".to_owned());
    }
    Ok(finding.note(format!("{shared} keys sent to both services")))
}
