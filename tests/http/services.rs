//! Two services with the same routes, in one database.

use std::num::NonZeroU32;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use pg_idempotency::http::{Decision, IdempotencyLayer, IdempotentTx, RequestResumer, ResumedRequest};
use pg_idempotency::lease::{Finding, InDoubt, Lease, Policy, Reconciler, Visit};
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Key, Misuse, operator};
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE};
use sqlx::PgPool;

use crate::support::{create_effects, effects, insert, leased, leasing, post_to, transactional, user};

const SERVICES: [&str; 2] = ["orders", "billing"];
const MINUTE: Duration = Duration::from_secs(60);

fn storing(pool: &PgPool, policy: Policy, service: &str) -> IdempotencyLayer {
    let options = leasing(policy).store_request(true).max_attempts(NonZeroU32::MIN.saturating_add(4));
    IdempotencyLayer::leased(pool.clone(), options, user).service(service)
}

/// A service that answers with its name from the second attempt on.
fn failing_once(layer: &IdempotencyLayer, name: &'static str) -> Router {
    let handler = async move |lease: Lease| {
        let status = if lease.attempt() == 1 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::CREATED };
        (status, name)
    };
    Router::new().route("/events", post(handler)).route_layer(layer.clone())
}

/// A gateway may pass the key of one client on to both services.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_service_performs_the_request_with_one_key_of_a_client(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let of = |name: &'static str| {
        let handler = async move |mut tx: IdempotentTx| format!("{name} {}", insert(&mut tx, name).await);
        Router::new().route("/events", post(handler)).route_layer(transactional(&pool).service(name))
    };
    for (replayed, effect) in [(false, 1), (true, 1)] {
        for (nth, name) in (effect..).zip(SERVICES) {
            let answer = post_to(&of(name), "/events", "key-1", "x").await;
            assert_eq!((answer.status, answer.is_replayed()), (StatusCode::OK, replayed), "{name}");
            assert_eq!(&answer.body[..], format!("{name} {nth}").as_bytes());
        }
    }
    assert_eq!(effects(&pool).await, 2);
    for name in SERVICES {
        let layer = transactional(&pool).service(name);
        assert_eq!(layer.recorded_operation("POST /events"), format!("{name} POST /events"));
        let key = Key::new("ada", layer.recorded_operation("POST /events"), "key-1")?;
        assert!(operator::show(&pool, &key).await?.is_some(), "{name}");
    }
    assert_eq!(transactional(&pool).recorded_operation("POST /events"), "POST /events");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumer_takes_the_requests_of_its_own_service(pool: PgPool) -> anyhow::Result<()> {
    let permit = async |_: &Key, _: &mut Request<Bytes>| Ok::<_, Error>(Decision::Resume);
    let [orders, billing] = SERVICES.map(|name| storing(&pool, AT_LEAST_ONCE, name));
    let answer = post_to(&failing_once(&billing, "billing"), "/events", "key-1", "x").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    let key = Key::new("ada", "billing POST /events", "key-1")?;
    age(&pool, &key, MINUTE).await?;
    let resumed = orders.resume_one("POST /events", permit, failing_once(&orders, "orders")).await?;
    assert_eq!(resumed, None, "the request of another service");
    let resumed = billing.resume_one("POST /events", permit, failing_once(&billing, "billing")).await?;
    assert_eq!(resumed, Some(ResumedRequest::Answered(key, StatusCode::CREATED)));
    let retry = post_to(&failing_once(&billing, "billing"), "/events", "key-1", "x").await;
    assert_eq!((retry.is_replayed(), &retry.body[..]), (true, &b"billing"[..]));
    Ok(())
}

/// With the name twice, the resumer would search for ever, and find nothing.
#[sqlx::test(migrations = false)]
async fn a_resumer_takes_the_operation_without_the_name_of_the_service(pool: PgPool) {
    let layer = storing(&pool, AT_LEAST_ONCE, "billing");
    let refused = RequestResumer::new(&layer, "billing POST /events").err();
    assert!(
        matches!(&refused, Some(Error::Misuse(Misuse::Options { problem, .. })) if problem.contains("without this name")),
        "{refused:?}"
    );
    let longest = format!("POST /{}", "x".repeat(255 - "billing POST /".len()));
    assert!(RequestResumer::new(&layer, &longest).is_ok());
    let refused = RequestResumer::new(&layer, &(longest + "x")).err();
    assert!(
        matches!(&refused, Some(Error::Misuse(Misuse::Options { problem, .. })) if problem.contains("256 bytes")),
        "{refused:?}"
    );
    // A method may have the name of a service.
    let layer = storing(&pool, AT_LEAST_ONCE, "POST");
    assert!(RequestResumer::new(&layer, "POST /events").is_ok());
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_reconciler_asks_about_the_requests_of_its_own_service(pool: PgPool) -> anyhow::Result<()> {
    let [orders, billing] = SERVICES.map(|name| storing(&pool, AT_MOST_ONCE, name));
    let answer = post_to(&failing_once(&billing, "billing"), "/events", "key-1", "x").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    let visit = async |layer: &IdempotencyLayer| {
        let options = leasing(AT_MOST_ONCE).store_request(true);
        let operation = layer.recorded_operation("POST /events");
        let nobody = async |_: &InDoubt| -> Result<Finding, Error> { panic!("too early") };
        Reconciler::new(options, &operation, MINUTE)?.visit_one(&pool, nobody).await
    };
    assert_eq!(visit(&orders).await?, Visit::Nothing, "the request of another service");
    assert_eq!(visit(&billing).await?, Visit::Noted);
    Ok(())
}

/// The longest name leaves room for a usual route, and a route that is too long is refused before anything is claimed.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_name_of_a_service_counts_as_a_part_of_the_operation(pool: PgPool) {
    let name = "b".repeat(64);
    for (length, status) in [(255, StatusCode::OK), (256, StatusCode::BAD_REQUEST)] {
        let route = format!("/{}", "x".repeat(length - name.len() - " POST /".len()));
        let layer = leased(&pool, AT_LEAST_ONCE).service(&name);
        let app = Router::new().route(&route, post(async |_: Lease| "done")).route_layer(layer);
        assert_eq!(post_to(&app, &route, "key-1", "x").await.status, status, "{length}");
    }
}
