//! Callers that are dropped at every poll, and a connection that others use after them.

use std::collections::HashSet;
use std::pin::pin;
use std::task::Poll;

use futures_util::future::join_all;

use crate::history::What;
use crate::stage::{Finding, Stage};
use crate::subject::{Request, SAFE_TO_DROP};
use crate::world::{Least, World, pool};

/// Few, so that whatever a dropped call leaves on a connection is met by the next.
const CONNECTIONS: u32 = 3;
const CLIENTS: usize = 5;
/// A call is polled about 15 times.
const MOST_POLLS: u64 = 24;

const LEAST: Least = &[("future dropped", 50)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "dropped-futures", LEAST).await?;
    let pool = pool(&world.options, CONNECTIONS);
    let clients = (0..CLIENTS).map(|client| {
        let (world, pool) = (world.clone(), pool.clone());
        tokio::spawn(async move {
            let name = format!("c{client}");
            let mut random = world.random(&name);
            let mut written = Vec::new();
            let mut number = 0;
            while !world.is_over() {
                number += 1;
                let mut request = Request::new(&world.choose_key(&mut random), &format!("{name}/{number}"));
                request.door = random.of(SAFE_TO_DROP);
                let polls = random.below(MOST_POLLS);
                world.history.add(&request.call, &request.key, What::Invoked);
                let what = drop_after(polls, world.subject.call(&pool, &request)).await.unwrap_or_else(|| {
                    world.fault("future dropped");
                    What::Unknown("dropped".to_owned())
                });
                world.history.add(&request.call, &request.key, what);
                // In autocommit: acknowledged, so it is there, unless the connection was left in a transaction.
                let insert = sqlx::query("insert into written values ($1::text)").bind(&request.call).execute(&pool);
                if insert.await.is_ok() {
                    written.push(request.call);
                }
            }
            written
        })
    });
    let mut written = HashSet::new();
    for client in join_all(clients).await {
        written.extend(client?);
    }
    pool.close().await;
    let mut finding = Finding::of(&world).await?;
    let there: Vec<String> = sqlx::query_scalar("select call from written").fetch_all(&world.observer).await?;
    for call in there {
        written.remove(&call);
    }
    finding.violations.extend(written.iter().map(|call| format!("a write after {call} was acknowledged, and is lost")));
    Ok(finding)
}

/// Polls at most so often, and then drops.
async fn drop_after<F: Future>(polls: u64, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut polled = 0;
    std::future::poll_fn(move |context| {
        if polled == polls {
            return Poll::Ready(None);
        }
        polled += 1;
        match future.as_mut().poll(context) {
            Poll::Pending if polled == polls => Poll::Ready(None),
            polled => polled.map(Some),
        }
    })
    .await
}
