//! Janitors against records that live for milliseconds and are taken over by ones that are to last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use pg_idempotency::{Fingerprint, Janitor};
use sqlx::PgPool;
use tokio::time::sleep;

use crate::beside::{CALLERS, InSteps, LEASED};
use crate::checker::violations_with_brief_retention;
use crate::stage::{Finding, Stage};
use crate::subject::{SAFE_TO_DROP, Subject};
use crate::world::{Least, PAUSE, World, pool};

const CLIENTS: u64 = 8;
const JANITORS: usize = 2;
/// Longer than a call, most of the time.
const BRIEF: Duration = Duration::from_millis(12);
/// Enough for a key to expire and be taken over some times before it is to last.
const REPEATS: u64 = 60;

/// An operation in steps that is unfinished, and long forgotten: its key is new. Nothing of it may be used again.
const FORGOTTEN: &str = r#"
    insert into idempotency.record
        (mode, scope, operation, value, fingerprint, token, attempt, lease_until, claimed_at, expires_at, request, steps)
    values
        ('in_steps', $1::text, 'chaos', $1::text, $2::bytea, -1, 2, now() - interval '1 h', now() - interval '1 day',
        now() - interval '1 ms', to_json($1::text)::text::bytea,
        '{"row": {"result": "\"forgotten\"", "attempt": 1}, "text": {"begun": "2026-01-01T00:00:00Z", "attempt": 2}}')
    on conflict do nothing"#;

const LEAST: Least = &[("record purged", 20)];
const LEAST_IN_STEPS: Least = &[("operation in steps forgotten", 3)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "janitor-races", LEAST).await?;
    let steps = InSteps::start(world.beside(LEAST_IN_STEPS, None), CALLERS, LEASED).await?;
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
    tasks.push(tokio::spawn(forget(steps.world.clone(), pool.clone())));
    for task in join_all(tasks).await {
        task?;
    }
    Janitor::new(pool.clone()).with_grace(Duration::ZERO).sweep_once(500).await?;
    pool.close().await;
    world.settle().await?;
    let after = world.aftermath().await?;
    let mut finding = Finding::with(&world, violations_with_brief_retention(&world.history.calls(), &after));
    finding.add(steps.finding().await?);
    Ok(finding)
}

/// Leaves forgotten operations in steps under keys that are about to be asked for.
async fn forget(world: Arc<World>, pool: PgPool) {
    let mut random = world.random("forgetful");
    while !world.is_over() {
        let value = world.choose_key(&mut random);
        let fingerprint = Fingerprint::of_json(value.as_str()).expect("a string");
        let forgotten = sqlx::query(FORGOTTEN).bind(&value).bind(fingerprint.as_bytes()).execute(&pool).await;
        if forgotten.is_ok_and(|done| done.rows_affected() == 1) {
            world.fault("operation in steps forgotten");
        }
        sleep(PAUSE).await;
    }
}
