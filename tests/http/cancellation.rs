//! Clients that hang up at any moment, and runtimes that shut down.

use std::future::Future as _;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use axum::http::StatusCode;
use rig::gate::{Gate, PATIENCE};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::time::timeout;
use tower::ServiceExt as _;

use crate::support::{
    app, app_without_layer, create_effects, effects, pool_of, post_to, records, request, stops_at, transactional,
    until_nothing_is_open,
};

/// For each n, the request is polled at most n times and dropped: its run goes to the end, or never began.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_is_dropped_at_any_poll_is_done_once_or_not_at_all(_: PgPoolOptions, options: PgConnectOptions) {
    let pool = pool_of(2, &options).await;
    create_effects(&pool).await;
    let layer = transactional(&pool);
    let runs = layer.runs();
    let app = app(layer);
    for polls in 0..6 {
        for again in 0..5 {
            let key = format!("key-{polls}-{again}");
            {
                let mut call = pin!(app.clone().oneshot(request("POST", "/effects", Some(&key), "x")));
                for _ in 0..polls {
                    if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                        break;
                    }
                    // So that the run is at another point each time.
                    tokio::time::sleep(Duration::from_millis(again)).await;
                }
            }
            timeout(PATIENCE, runs.finished()).await.expect("in time");
            let before = effects(&pool).await;
            assert_eq!(before, records(&pool).await);
            let answer = post_to(&app, "/effects", &key, "x").await;
            assert_eq!(answer.status, StatusCode::CREATED);
            assert_eq!(effects(&pool).await, before + i64::from(!answer.is_replayed()));
        }
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (30, 30));
    until_nothing_is_open(&pool).await;
}

/// A runtime shuts down during a run: everything is rolled back, and the next process performs.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_runtime_that_ends_under_a_run_leaves_nothing(_: PgPoolOptions, options: PgConnectOptions) {
    let pool = pool_of(2, &options).await;
    create_effects(&pool).await;
    let gate = Gate::new();
    let dying = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let gated = gate.clone();
    dying.spawn(async move {
        let pool = PgPoolOptions::new().connect_with(options).await.expect("a pool");
        let app = stops_at(&gated).merge(app_without_layer()).layer(transactional(&pool));
        post_to(&app, "/gate", "key-1", "x").await
    });
    gate.reached().await;
    dying.shutdown_background();
    until_nothing_is_open(&pool).await;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    let app = stops_at(&gate).layer(transactional(&pool));
    gate.open();
    assert_eq!(post_to(&app, "/gate", "key-1", "x").await.status, StatusCode::OK);
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
}
