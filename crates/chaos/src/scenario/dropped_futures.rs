//! A call that is dropped at any poll leaves the next user of its connection no open transaction. The tests in
//! `tests/behaviour/cancellation.rs` drop one call alone. Here other calls use the connections.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::sleep;

use crate::callers::{Callers, Way};
use crate::finding::Finding;
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
use crate::world::{Least, PAUSE, World, pool};

/// Few, so that the next call meets whatever a dropped one leaves on a connection.
const CONNECTIONS: u32 = 3;
const CLIENTS: usize = 5;
/// A call is polled about 15 times.
const MOST_POLLS: u64 = 24;

const LEAST: Least = &[("future dropped", 50)];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let pool = pool(&world.options, CONNECTIONS);
    let way = Way::Transaction(|random, request| {
        request.enter(random, SAFE_TO_DROP);
        request.polls = usize::try_from(random.below(MOST_POLLS)).ok();
    });
    let mut callers = Callers::start(&world, way, pool.clone(), "c", CLIENTS);
    // An acknowledged write in autocommit is there, unless the connection was left in a transaction.
    let written = Arc::new(Mutex::new(HashSet::new()));
    let (writing, acknowledged) = (world.clone(), written.clone());
    callers.spawn(async move {
        let mut number = 0;
        while !writing.is_over() {
            number += 1;
            let call = number.to_string();
            let insert = sqlx::query("insert into written values ($1::text)").bind(&call).execute(&pool);
            if insert.await.is_ok() {
                acknowledged.lock().unwrap_or_else(PoisonError::into_inner).insert(call);
            }
            sleep(PAUSE).await;
        }
    });
    callers.end().await?;
    let stored: Vec<String> = sqlx::query_scalar("select call from written").fetch_all(&world.observer).await?;
    let mut written = std::mem::take(&mut *written.lock().unwrap_or_else(PoisonError::into_inner));
    for call in stored {
        written.remove(&call);
    }
    let mut finding = callers.finding().await?;
    finding.violations.extend(written.iter().map(|call| format!("write {call} was acknowledged, and is lost")));
    Ok(finding)
}
