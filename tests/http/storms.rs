//! A storm of requests with one key. It costs requests with other keys time, and nothing else.

use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use futures_util::future::join_all;
use pg_idempotency::http::IdempotencyLayer;
use rig::gate::{Gate, PATIENCE};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::interval;

use crate::support::{
    Answer, app_without_layer, create_effects, effects, pool_of, post_to, spawned_post, stops_at, transactional,
    waiting,
};

/// Three times the default number of runs for a pool of three.
const STORM: usize = 300;
/// How many requests with other keys come during a storm, and how often. A third of them come before the first request
/// with the storm's key has ended.
const STRANGERS: usize = 300;
const PACE: Duration = Duration::from_millis(10);

fn app(gate: &Gate, layer: IdempotencyLayer) -> Router {
    stops_at(gate).merge(app_without_layer()).layer(layer)
}

fn storm(app: &Router) -> Vec<JoinHandle<Answer>> {
    (0..STORM).map(|_| spawned_post(app, "/gate", "storm", "x")).collect()
}

/// Sends requests, each with a key of its own, until the storm is over. Returns how many there were.
async fn strangers_during(app: &Router, name: &str, storm: &[JoinHandle<Answer>]) -> i64 {
    let mut sent = 0;
    while sent == 0 || storm.iter().any(|one| !one.is_finished()) {
        let stranger = post_to(app, "/effects", &format!("{name}-{sent}"), "x").await;
        assert_eq!(stranger.status, StatusCode::CREATED, "stranger {sent}: {stranger:?}");
        sent += 1;
    }
    sent
}

async fn all_are_replayed(storm: Vec<JoinHandle<Answer>>) {
    for answer in join_all(storm).await {
        let answer = answer.expect("joined");
        assert!(answer.is_replayed(), "{answer:?}");
    }
}

/// A storm of duplicates arrives while the first request is performed. Requests with other keys come at a steady pace,
/// before and after it ends.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn duplicates_that_waited_for_one_request_take_no_places_of_others(_: PgPoolOptions, options: PgConnectOptions) {
    create_effects(&pool_of(1, &options).await).await;
    let mut done = 0;
    for connections in [3, 1] {
        let pool = pool_of(connections, &options).await;
        let gate = Gate::new();
        let app = app(&gate, waiting(&pool, PATIENCE));
        let key = format!("storm-{connections}");
        let first = spawned_post(&app, "/gate", &key, "x");
        gate.reached().await;
        let storm: Vec<_> = (0..STORM).map(|_| spawned_post(&app, "/gate", &key, "x")).collect();
        let (mut strangers, mut pace) = (Vec::new(), interval(PACE));
        for number in 0..STRANGERS {
            pace.tick().await;
            if number == STRANGERS / 3 {
                gate.open();
            }
            strangers.push(spawned_post(&app, "/effects", &format!("stranger-{connections}-{number}"), "x"));
        }
        let strangers = join_all(strangers).await.into_iter().map(|answer| answer.expect("joined").status);
        let refused = strangers.filter(|status| *status != StatusCode::CREATED).count();
        assert_eq!(refused, 0, "of {STRANGERS} requests with other keys, and {connections} connections");
        assert_eq!(first.await.expect("joined").status, StatusCode::OK);
        all_are_replayed(storm).await;
        done += 1 + i64::try_from(STRANGERS).expect("a small number");
        assert_eq!(effects(&pool).await, done);
        pool.close().await;
    }
}

/// No request waits for another one with its key: all are replays, and the layer rejects duplicates in flight.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn replays_of_one_key_take_no_places_of_others(_: PgPoolOptions, options: PgConnectOptions) {
    let pool = pool_of(3, &options).await;
    create_effects(&pool).await;
    let gate = Gate::new();
    let app = app(&gate, transactional(&pool));
    gate.open();
    assert_eq!(post_to(&app, "/gate", "storm", "x").await.status, StatusCode::OK);
    let storm = storm(&app);
    yield_now().await;
    assert_eq!(effects(&pool).await, 1);
    let strangers = strangers_during(&app, "stranger", &storm).await;
    all_are_replayed(storm).await;
    assert_eq!(effects(&pool).await, 1 + strangers);
}
