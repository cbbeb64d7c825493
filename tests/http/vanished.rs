//! A connection to the database that vanishes: nothing is refused and nothing is answered, and TCP takes a quarter of
//! an hour to notice, or does not notice at all. The run ends all the same, and the connection leaves the pool.

use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, Runs};
use pg_idempotency::lease::Policy;
use rig::gate::{Gate, PATIENCE};
use rig::proxy::Proxy;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::time::timeout;

use crate::support::{
    Answer, app_without_layer, create_effects, effects, insert, leased, request, send, stops_at, transactional,
    until_nothing_is_open,
};

/// Long enough for a request on a busy machine.
const LIMIT: Duration = Duration::from_secs(2);
const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: Duration::from_secs(6) };

/// A pool behind a network. It has one place, so the next request shows whether the place is free.
struct Behind {
    /// Without the network.
    server: PgPool,
    proxy: Proxy,
    pool: PgPool,
}

impl Behind {
    async fn of(server: PgPool) -> Self {
        let proxy = Proxy::before(&server.connect_options()).await.expect("a proxy");
        // Without the ping, so that the statement meets the vanished connection.
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(LIMIT).test_before_acquire(false);
        let pool = pool.connect_with(proxy.options.clone()).await.expect("a pool");
        create_effects(&server).await;
        Self { server, proxy, pool }
    }

    /// The server notices that the connections are gone, which may take it hours.
    async fn end_lost_sessions(&self) {
        sqlx::query(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid() and state like 'idle in%'",
        )
        .execute(&self.server)
        .await
        .expect("ended");
        until_nothing_is_open(&self.server).await;
    }

    /// The connection that waits in the pool vanishes.
    async fn lose_idle_connection(&self) {
        timeout(PATIENCE, async {
            while self.pool.num_idle() == 0 {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("it returns to the pool");
        self.proxy.lose_connections();
    }

    fn layer(&self) -> IdempotencyLayer {
        transactional(&self.pool).optional_key(true).run_timeout(LIMIT)
    }
}

async fn post_once(app: &Router, uri: &str, key: Option<&str>) -> Answer {
    timeout(PATIENCE, send(app, request("POST", uri, key, "x"))).await.expect("in time")
}

fn assert_unavailable(answer: &Answer, kind: &str, runs: &Runs) {
    assert_eq!((answer.status, &*answer.problem()), (StatusCode::SERVICE_UNAVAILABLE, kind));
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(runs.count(), 0);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_that_vanishes_before_the_commit_frees_the_key_and_its_place(pool: PgPool) {
    let behind = Behind::of(pool).await;
    let (gate, layer) = (Gate::new(), behind.layer());
    let runs = layer.runs();
    let app = stops_at(&gate).merge(app_without_layer()).layer(layer);
    for key in [Some("key-1"), None] {
        let first = tokio::spawn({
            let app = app.clone();
            async move { post_once(&app, "/gate", key).await }
        });
        gate.reached().await;
        behind.proxy.lose_connections();
        gate.open();
        assert_unavailable(&first.await.expect("joined"), "unavailable", &runs);
    }
    // Only the server still has the transaction.
    assert_eq!(post_once(&app, "/gate", Some("key-1")).await.problem(), "in-flight");
    behind.end_lost_sessions().await;
    gate.open();
    assert_eq!(post_once(&app, "/gate", Some("key-1")).await.status, StatusCode::OK);
    assert_eq!(effects(&behind.server).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_that_vanishes_before_the_claim_is_replaced(pool: PgPool) {
    let behind = Behind::of(pool).await;
    let layer = behind.layer();
    let runs = layer.runs();
    let app = app_without_layer().layer(layer);
    for key in [Some("key-1"), None] {
        behind.lose_idle_connection().await;
        assert_unavailable(&post_once(&app, "/effects", key).await, "unavailable", &runs);
        assert_eq!(post_once(&app, "/effects", key).await.status, StatusCode::CREATED);
    }
    assert_eq!(effects(&behind.server).await, 2);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_that_vanishes_under_the_handler_is_replaced(pool: PgPool) {
    let behind = Behind::of(pool).await;
    let layer = behind.layer();
    let (proxy, runs) = (behind.proxy.clone(), layer.runs());
    let loses = async move |mut tx: IdempotentTx| {
        insert(&mut tx, "before").await;
        proxy.lose_connections();
        insert(&mut tx, "never").await;
        "never"
    };
    let app = app_without_layer().route("/loses", post(loses)).layer(layer);
    for key in [Some("key-1"), None] {
        assert_unavailable(&post_once(&app, "/loses", key).await, "timed-out", &runs);
        assert_eq!(post_once(&app, "/effects", Some("key-2")).await.status, StatusCode::CREATED);
    }
    assert_eq!(effects(&behind.server).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_that_vanishes_before_a_lease_is_claimed_is_replaced(pool: PgPool) {
    let behind = Behind::of(pool).await;
    let layer = leased(&behind.pool, AT_MOST_ONCE);
    let runs = layer.runs();
    let app = Router::new().route("/sms", post(async || "sent")).layer(layer);
    assert_eq!(post_once(&app, "/sms", Some("key-1")).await.status, StatusCode::OK);
    behind.lose_idle_connection().await;
    assert_unavailable(&post_once(&app, "/sms", Some("key-2")).await, "unavailable", &runs);
    assert_eq!(post_once(&app, "/sms", Some("key-2")).await.status, StatusCode::OK);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_that_vanishes_before_a_lease_is_completed_is_replaced(pool: PgPool) {
    let behind = Behind::of(pool).await;
    let gate = Gate::new();
    let gated = gate.clone();
    let handler = async move || {
        gated.pass().await;
        "sent"
    };
    let app = Router::new().route("/sms", post(handler)).layer(leased(&behind.pool, AT_MOST_ONCE));
    let first = tokio::spawn({
        let app = app.clone();
        async move { post_once(&app, "/sms", Some("key-1")).await }
    });
    gate.reached().await;
    behind.lose_idle_connection().await;
    gate.open();
    assert_eq!(first.await.expect("joined").status, StatusCode::OK);
    assert!(post_once(&app, "/sms", Some("key-1")).await.is_replayed());
}
