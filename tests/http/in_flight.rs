//! Duplicates of a request that is not finished.

use std::pin::pin;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use pg_idempotency::OnDuplicate;
use pg_idempotency::http::IdempotencyLayer;
use rig::cases::each;
use rig::gate::{Gate, cancel_after};
use rig::lease::AT_LEAST_ONCE;
use sqlx::PgPool;

use crate::support::{
    app_without_layer, create_effects, effects, leasing, pool_of, post_to, spawned_post, stops_at, transactional,
    until, until_runs, user, waiting,
};

fn app(gate: &Gate, layer: IdempotencyLayer) -> Router {
    stops_at(gate).merge(app_without_layer()).layer(layer)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_duplicate_is_refused_at_once(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let app = app(&gate, transactional(&pool));
    let first = spawned_post(&app, "/gate", "key-1", "x");
    gate.reached().await;
    let started = Instant::now();
    let duplicate = post_to(&app, "/gate", "key-1", "x").await;
    // The default wait would be 5 seconds.
    assert!(started.elapsed() < Duration::from_secs(4));
    assert_eq!((duplicate.status, &*duplicate.problem()), (StatusCode::CONFLICT, "in-flight"));
    assert_eq!(duplicate.headers["retry-after"], "1");
    gate.open();
    let first = first.await.expect("joined");
    let repeat = post_to(&app, "/gate", "key-1", "x").await;
    assert_eq!((repeat.is_replayed(), repeat.body), (true, first.body));
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_wait_ends_at_its_limit(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let app = app(&gate, waiting(&pool, Duration::from_millis(300)));
    let first = spawned_post(&app, "/gate", "key-1", "x");
    gate.reached().await;
    let started = Instant::now();
    let duplicate = post_to(&app, "/gate", "key-1", "x").await;
    assert!((Duration::from_millis(300)..Duration::from_secs(5)).contains(&started.elapsed()));
    assert_eq!((duplicate.status, &*duplicate.problem()), (StatusCode::CONFLICT, "in-flight"));
    gate.open();
    assert_eq!(first.await.expect("joined").status, StatusCode::OK);
}

/// The first request has the only connection. A duplicate in the same process needs none, even if it waits.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_duplicate_in_the_same_process_needs_no_connection(pool: PgPool) {
    let pool = pool_of(1, &pool.connect_options()).await;
    create_effects(&pool).await;
    let layers = [transactional(&pool), waiting(&pool, Duration::from_secs(20))];
    each(layers.into_iter().enumerate(), async |(attempt, layer)| {
        let gate = Gate::new();
        let app = app(&gate, layer);
        let post = |body| spawned_post(&app, "/gate", &format!("key-{attempt}"), body);
        let first = post("x");
        gate.reached().await;
        let reused = post("y").await.expect("joined");
        assert_eq!((reused.status, &*reused.problem()), (StatusCode::UNPROCESSABLE_ENTITY, "key-reused"));
        let duplicate = post("x");
        if attempt == 0 {
            assert_eq!(duplicate.await.expect("joined").problem(), "in-flight");
            gate.open();
        } else {
            gate.open();
            assert!(duplicate.await.expect("joined").is_replayed());
        }
        assert_eq!(first.await.expect("joined").status, StatusCode::OK);
        assert!(post("x").await.expect("joined").is_replayed(), "it is forgotten when it has ended");
        Ok(())
    })
    .await;
    assert_eq!(effects(&pool).await, 2);
}

/// A trigger lets the completion take a while, and moves the end of the retention to its end. The duplicate asked
/// before.
async fn a_record_expires_while_a_duplicate_waits(pool: &PgPool, app: Router, gate: &Gate) {
    create_effects(pool).await;
    sqlx::raw_sql(
        "create function expire() returns trigger language plpgsql as $$
            begin perform pg_sleep(0.3); new.expires_at := clock_timestamp(); return new; end $$;
         create trigger expire before update on idempotency.record
            for each row when (new.completed_at is not null) execute function expire()",
    )
    .execute(pool)
    .await
    .expect("a trigger");
    let first = spawned_post(&app, "/gate", "key-1", "x");
    gate.reached().await;
    let mut duplicate = pin!(post_to(&app, "/gate", "key-1", "x"));
    // One poll reads the request, and waits for the first one.
    assert!(cancel_after(1, duplicate.as_mut()).await.is_none());
    gate.open();
    assert_eq!(first.await.expect("joined").status, StatusCode::OK);
    // Performed again, it would wait at the gate.
    assert!(duplicate.await.is_replayed());
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_expires_while_a_duplicate_waits_in_the_process_is_its_answer(pool: PgPool) {
    let gate = Gate::new();
    let app = app(&gate, waiting(&pool, Duration::from_secs(20)));
    a_record_expires_while_a_duplicate_waits(&pool, app, &gate).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_expires_while_a_duplicate_waits_for_a_lease_is_its_answer(pool: PgPool) {
    let options = leasing(AT_LEAST_ONCE).on_duplicate(OnDuplicate::Wait(Duration::from_secs(20)));
    let gate = Gate::new();
    let gated = gate.clone();
    let handler = async move || gated.pass().await;
    let leased = IdempotencyLayer::leased(pool.clone(), options, user);
    let app = Router::new().route("/gate", axum::routing::post(handler)).layer(leased);
    a_record_expires_while_a_duplicate_waits(&pool, app, &gate).await;
}

/// The duplicate has asked, and waits for the only connection.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_expires_while_a_duplicate_waits_for_a_connection_is_its_answer(other: PgPool) {
    let pool = pool_of(1, &other.connect_options()).await;
    create_effects(&other).await;
    let layer = transactional(&pool);
    let runs = layer.runs();
    let app = app_without_layer().layer(layer);
    let first = post_to(&app, "/effects", "key-1", "x").await;
    let held = pool.acquire().await.expect("the only connection");
    let duplicate = spawned_post(&app, "/effects", "key-1", "x");
    until_runs(&runs, |count| count > 0).await;
    sqlx::raw_sql("update idempotency.record set expires_at = statement_timestamp() + interval '300 ms'")
        .execute(&other)
        .await
        .expect("expires");
    until(&other, "select expires_at < statement_timestamp() from idempotency.record").await;
    drop(held);
    let duplicate = duplicate.await.expect("joined");
    assert_eq!((duplicate.is_replayed(), duplicate.body), (true, first.body));
    // A request that comes later performs.
    assert!(!post_to(&app, "/effects", "key-1", "x").await.is_replayed());
    assert_eq!(effects(&other).await, 2);
}
