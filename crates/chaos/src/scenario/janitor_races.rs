//! Janitors sweep records that live for milliseconds, while calls take over the same keys with records that must stay.
//! `crates/interleave` has every order of one sweep and one take-over. Here many sweeps run beside load.

use std::sync::Arc;
use std::time::Duration;

use pg_idempotency::{Fingerprint, Janitor};
use sqlx::PgPool;
use tokio::time::sleep;

use crate::callers::{Callers, Way};
use crate::checker::violations_with_brief_retention;
use crate::finding::Finding;
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
use crate::world::{Least, Next, PAUSE, Setup, Window, World, pool};

const CLIENTS: usize = 8;
const JANITORS: usize = 2;
/// Longer than a call, most of the time.
const BRIEF: Duration = Duration::from_millis(12);
/// Enough answers for a key to expire and be taken over some times before its record must stay.
const WINDOW: Window = Window { keys: 1, next: Next::Answers(60) };

/// An unfinished operation in steps that has expired, under a key that is about to be used. No call may use a part of it.
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

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let setup = Setup { least: LEAST, window: WINDOW, ..Setup::default() };
    let world = World::on(stage.cluster.create_database(stage.name).await?, stage, setup).await?;
    let steps = Callers::in_steps_beside(&world, LEAST_IN_STEPS);
    let pool = pool(&world.options, 10);
    let way = Way::Transaction(|random, request| {
        request.enter(random, SAFE_TO_DROP);
        if !random.one_in(8) {
            request.retention = BRIEF;
            request.call.push_str("-brief");
        }
    });
    let mut callers = Callers::start(&world, way, pool.clone(), "c", CLIENTS);
    for _ in 0..JANITORS {
        callers.spawn(sweep(world.clone(), pool.clone()));
    }
    callers.spawn(forget(steps.world.clone(), pool.clone()));
    callers.end().await?;
    Janitor::new(pool).with_grace(Duration::ZERO)?.sweep_once(500).await?;
    callers.settle().await?;
    let violations = violations_with_brief_retention(&world.history.calls(), &world.aftermath().await?);
    let mut finding = world.finding(violations);
    finding.add(steps.finding().await?);
    Ok(finding)
}

async fn sweep(world: Arc<World>, pool: PgPool) {
    let janitor = Janitor::new(pool.clone()).with_grace(Duration::ZERO).expect("in range").with_pause(Duration::ZERO);
    while !world.is_over() {
        let broken = match world.mutant {
            Some(mutant) => mutant.sweep(&pool).await,
            None => None,
        };
        let swept = match broken {
            Some(swept) => swept.unwrap_or_default(),
            None => janitor.sweep_once(500).await.map_or(0, |swept| swept.rows()),
        };
        (0..swept).for_each(|_| world.fault("record purged"));
    }
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
