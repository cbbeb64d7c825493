//! Janitors against records that live for milliseconds and are taken over by ones that are to last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use pg_idempotency::Janitor;

use crate::checker::violations_with_brief_retention;
use crate::stage::{Finding, Stage};
use crate::subject::{SAFE_TO_DROP, Subject};
use crate::world::{Least, World, pool};

const CLIENTS: u64 = 8;
const JANITORS: usize = 2;
/// Longer than a call, most of the time.
const BRIEF: Duration = Duration::from_millis(12);
/// Enough for a key to expire and be taken over some times before it is to last.
const REPEATS: u64 = 60;

const LEAST: Least = &[("record purged", 20)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "janitor-races", LEAST).await?;
    let pool = pool(&world.options, 10);
    let asked = Arc::new(AtomicU64::new(0));
    let mut tasks = world.crowd(&pool, CLIENTS, move |random, request| {
        request.key = format!("j{}", asked.fetch_add(1, Ordering::Relaxed) / REPEATS);
        request.door = random.of(SAFE_TO_DROP);
        if !random.one_in(8) {
            request.retention = BRIEF;
            request.call.push_str("-brief");
        }
    });
    for _ in 0..JANITORS {
        let (world, pool) = (world.clone(), pool.clone());
        tasks.push(tokio::spawn(async move {
            let janitor = Janitor::new(pool.clone()).with_grace(Duration::ZERO).with_pause(Duration::ZERO);
            while !world.is_over() {
                let broken = match world.subject {
                    Subject::Mutant(mutant) => mutant.sweep(&pool).await,
                    Subject::Crate => None,
                };
                let swept = match broken {
                    Some(swept) => swept.unwrap_or_default(),
                    None => janitor.sweep_once(500).await.map_or(0, |swept| swept.rows()),
                };
                (0..swept).for_each(|_| world.fault("record purged"));
            }
        }));
    }
    for task in join_all(tasks).await {
        task?;
    }
    pool.close().await;
    world.settle().await?;
    let after = world.aftermath().await?;
    Ok(Finding::with(&world, violations_with_brief_retention(&world.history.calls(), &after)))
}
