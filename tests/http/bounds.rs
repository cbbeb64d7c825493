//! Runs are bounded in number and in time. A run outlives its client, so limits on connections do not bound it.

use std::future::pending;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::http::{IdempotentTx, Rejection};
use pg_idempotency::lease::Policy;
use rig::gate::{Gate, PATIENCE};
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower::ServiceExt as _;

use crate::support::{
    Answer, app, app_without_layer, create_effects, effects, insert, leased, of, options, pool_of, post_to, recorded,
    records, request, send, spawned_post, stops_at, transactional, until_nothing_is_open, until_runs,
};

const LIMIT: Duration = Duration::from_millis(100);

fn assert_is(answer: &Answer, kind: &str) {
    assert_is_with(answer, StatusCode::SERVICE_UNAVAILABLE, kind);
}

fn assert_is_with(answer: &Answer, status: StatusCode, kind: &str) {
    assert_eq!((answer.status, &*answer.problem()), (status, kind));
    assert_eq!(answer.headers["retry-after"], "1");
    assert!(answer.rejection.as_ref().is_some_and(Rejection::is_retryable));
}

/// It waits for a place as long as for a connection.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_run_over_the_limit_is_refused_before_it_begins(pool: PgPool) {
    let pool = PgPoolOptions::new()
        .acquire_timeout(Duration::from_secs(1))
        .connect_with(options(&pool))
        .await
        .expect("a pool");
    create_effects(&pool).await;
    let gate = Gate::new();
    let layer = transactional(&pool).max_runs(2).max_runs_of_one_scope(1);
    let runs = layer.runs();
    let app = stops_at(&gate).merge(app_without_layer()).layer(layer.optional_key(true));
    let first = spawned_post(&app, "/gate", "key-1", "x");
    gate.reached().await;
    // The account has used up its own share. A load balancer must not count this answer against the host.
    let refused = post_to(&app, "/effects", "key-2", "x").await;
    assert_is_with(&refused, StatusCode::TOO_MANY_REQUESTS, "too-many-requests");
    assert!(matches!(refused.rejection, Some(Rejection::TooManyRequests { limit: 1, .. })));
    let of_bob = of("bob", request("POST", "/gate", Some("key-2"), "x"));
    let second = tokio::spawn({
        let app = app.clone();
        async move { send(&app, of_bob).await }
    });
    gate.reached().await;
    // Now the layer is full, so the share of an account is not the cause.
    for other in [
        of("carol", request("POST", "/effects", Some("key-2"), "x")),
        request("POST", "/effects", Some("key-2"), "x"),
        request("POST", "/effects", None, "x"),
    ] {
        let refused = send(&app, other).await;
        assert_is(&refused, "overloaded");
        assert!(matches!(refused.rejection, Some(Rejection::Overloaded { limit: 2, .. })));
    }
    assert_eq!(runs.count(), 2);
    // An answer that needs no run is still given.
    assert_eq!(post_to(&app, "/gate", "key-1", "x").await.problem(), "in-flight");
    assert_eq!(post_to(&app, "/gate", "key-1", "y").await.problem(), "key-reused");
    assert_eq!(send(&app, request("GET", "/read", None, "")).await.body, "read");
    for run in [first, second] {
        gate.open();
        assert_eq!(run.await.expect("joined").status, StatusCode::OK);
    }
    assert_eq!(post_to(&app, "/effects", "key-2", "x").await.status, StatusCode::CREATED);
    assert_eq!((effects(&pool).await, records(&pool).await), (3, 3));
}

/// The requests without a key have one share together, whatever account they are of.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn requests_without_a_key_leave_room_for_the_others(pool: PgPool) {
    let pool = PgPoolOptions::new()
        .acquire_timeout(Duration::from_secs(1))
        .connect_with(options(&pool))
        .await
        .expect("a pool");
    create_effects(&pool).await;
    let gate = Gate::new();
    let layer = transactional(&pool).max_runs(2).max_runs_of_one_scope(1);
    let app = stops_at(&gate).merge(app_without_layer()).layer(layer.optional_key(true));
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, of("bob", request("POST", "/gate", None, "x"))).await }
    });
    gate.reached().await;
    let refused = send(&app, request("POST", "/effects", None, "x")).await;
    assert_is_with(&refused, StatusCode::TOO_MANY_REQUESTS, "too-many-requests");
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED);
    gate.open();
    assert_eq!(first.await.expect("joined").status, StatusCode::OK);
    assert_eq!((effects(&pool).await, records(&pool).await), (2, 1));
}

/// Each client has an account of its own, uploads, hangs up, and leaves a run that waits for the only connection. The
/// requests over the limit end with their clients.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn clients_that_hang_up_leave_a_bounded_number_of_runs(pool: PgPool) {
    let pool = pool_of(1, &pool.connect_options()).await;
    create_effects(&pool).await;
    let layer = transactional(&pool);
    let runs = layer.runs();
    let app = app(layer);
    let held = pool.acquire().await.expect("the only connection");
    let mut clients = JoinSet::new();
    for number in 0..100 {
        let mut request = request("POST", "/effects", Some("key-1"), "x");
        request.headers_mut().insert("x-user", number.into());
        clients.spawn(app.clone().oneshot(request));
    }
    // By default 32 for each connection of the pool.
    until_runs(&runs, |count| count >= 32).await;
    clients.shutdown().await;
    assert_eq!(runs.count(), 32);
    drop(held);
    timeout(PATIENCE, runs.finished()).await.expect("in time");
    assert_eq!((effects(&pool).await, records(&pool).await), (32, 32));
}

/// The pool has one connection, so the next request would notice if the handler kept it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_handler_that_never_returns_is_dropped_and_undone(pool: PgPool) {
    let pool = pool_of(1, &pool.connect_options()).await;
    create_effects(&pool).await;
    let never = async |mut tx: IdempotentTx| {
        insert(&mut tx, "never").await;
        pending::<&'static str>().await
    };
    let layer = transactional(&pool).optional_key(true).run_timeout(LIMIT);
    let runs = layer.runs();
    let app = app_without_layer().route("/never", post(never)).layer(layer);
    for key in [Some("key-1"), None] {
        let answer = send(&app, request("POST", "/never", key, "x")).await;
        assert_is(&answer, "timed-out");
        assert!(matches!(answer.rejection, Some(Rejection::TimedOut { limit: LIMIT, .. })));
    }
    assert_eq!(runs.count(), 0);
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED, "the key is free");
}

/// Under a lease a time-out is a failure of the handler: its effect outside is unknown.
async fn a_leased_handler_never_returns(pool: &PgPool, policy: Policy, released: bool) {
    let layer = leased(pool, policy).optional_key(true).run_timeout(LIMIT);
    let app = Router::new().route("/never", post(async || pending::<&'static str>().await)).layer(layer);
    for key in [Some("key-1"), None] {
        assert_is(&send(&app, request("POST", "/never", key, "x")).await, "timed-out");
    }
    assert_eq!(recorded::<bool>(pool, "lease_until = '-infinity'").await, released);
    assert_eq!(recorded::<String>(pool, "last_error").await, "the handler ran into the layer's time-out");
    let again = post_to(&app, "/never", "key-1", "x").await;
    assert_eq!(again.problem(), if released { "timed-out" } else { "indeterminate" });
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_handler_that_never_returns_releases_its_claim_under_at_least_once(pool: PgPool) {
    a_leased_handler_never_returns(&pool, AT_LEAST_ONCE, true).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_handler_that_never_returns_leaves_its_key_indeterminate_under_at_most_once(pool: PgPool) {
    a_leased_handler_never_returns(&pool, AT_MOST_ONCE, false).await;
}

/// A task that keeps the transaction keeps the key, too; the answer does not wait for it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_time_out_is_answered_while_a_task_still_has_the_transaction(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let gated = gate.clone();
    let spawns = async move |mut tx: IdempotentTx| {
        insert(&mut tx, "kept").await;
        let kept = tokio::spawn(async move {
            gated.pass().await;
            drop(tx);
        });
        kept.await.expect("joined");
        "done"
    };
    let layer = transactional(&pool).run_timeout(LIMIT);
    let app = Router::new().route("/spawns", post(spawns)).layer(layer);
    assert_is(&post_to(&app, "/spawns", "key-1", "x").await, "timed-out");
    gate.open();
    until_nothing_is_open(&pool).await;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}
