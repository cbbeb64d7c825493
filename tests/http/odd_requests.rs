//! Requests as few clients send them.

use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode, Uri};
use axum::routing::{any, post};
use futures_util::stream;
use http_body_util::{BodyExt as _, Full};
use pg_idempotency::http::{Decision, IdempotencyLayer, IdempotentTx, ResumedRequest};
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Key};
use rig::gate::PATIENCE;
use sqlx::PgPool;
use tokio::time::timeout;
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{Layer as _, ServiceExt as _};

use crate::support::{
    app, app_without_layer, create_effects, effects, post_to, records, request, send, transactional, user,
};

/// A client that asks a proxy sends the absolute form, here with an empty path.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_target_without_a_path_is_the_root(pool: PgPool) {
    let route = post(async |_: IdempotentTx, uri: Uri| uri.path().to_owned());
    let app = Router::new().route("/", route).layer(transactional(&pool));
    assert_eq!(post_to(&app, "http://x?a=1", "key-1", "x").await.body, "/");
    assert!(post_to(&app, "/?a=1", "key-1", "x").await.is_replayed());
}

/// A stored request can be sent again. A request that cannot be stored claims nothing.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_could_not_be_restored_is_refused(pool: PgPool) -> anyhow::Result<()> {
    let lease = Duration::from_secs(60);
    let attempts = 3.try_into()?;
    let options = LeaseOptions::new(Policy::AtLeastOnce { lease }).store_request(true).max_attempts(attempts);
    let targets = Arc::new(Mutex::new(Vec::new()));
    let asked = targets.clone();
    let fails_once = any(async move |uri: Uri| {
        let mut asked = asked.lock().expect("no panic");
        asked.push(uri.to_string());
        if asked.len() == 1 { StatusCode::BAD_GATEWAY } else { StatusCode::CREATED }
    });
    let layer = IdempotencyLayer::leased(pool.clone(), options, user).methods([Method::POST, Method::CONNECT]);
    let layer = layer.operation(|_| Some("ask".to_owned()));
    let routes = Router::new().route("/", fails_once.clone()).fallback(fails_once).layer(layer.clone());

    let tunnel = send(&routes, request("CONNECT", "example.com:443", Some("key-1"), "x")).await;
    assert_eq!((tunnel.status, records(&pool).await), (StatusCode::BAD_REQUEST, 0));

    assert_eq!(post_to(&routes, "http://x?a=1", "key-2", "x").await.status, StatusCode::BAD_GATEWAY);
    let key = Key::new("ada", "ask", "key-2")?;
    age(&pool, &key, lease).await?;
    let permit = async |_: &Key, _: &mut Request<Bytes>| Ok::<_, Error>(Decision::Resume);
    let resumed = layer.resume_one("ask", permit, routes).await?;
    assert_eq!(resumed, Some(ResumedRequest::Answered(key, StatusCode::CREATED)));
    assert_eq!(*targets.lock().expect("no panic"), ["http://x/?a=1", "/?a=1"]);
    Ok(())
}

/// A client chooses what an operation contains that is made of the path.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_operation_that_the_path_makes_unusable_is_a_mistake_of_the_client(pool: PgPool) {
    create_effects(&pool).await;
    let layer = transactional(&pool).operation(|parts| Some(parts.uri.path().replace("%C2%85", "\u{85}")));
    let app = app(layer);
    for id in ["x".repeat(300), "%C2%85".to_owned()] {
        let refused = post_to(&app, &format!("/accounts/{id}/effects"), "key-1", "x").await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::BAD_REQUEST, "malformed-key"), "{id}");
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// No fingerprint covers them, so a handler must not act on them.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn trailers_of_a_request_do_not_reach_the_handler(pool: PgPool) {
    let route = post(async |_: IdempotentTx, body: Body| {
        let body = body.collect().await.expect("a body");
        format!("{:?}", body.trailers().is_some())
    });
    let app = Router::new().route("/trailers", route).layer(transactional(&pool).optional_key(true));
    for key in [Some("key-1"), None] {
        let trailers = HeaderMap::from_iter([("x-amount".parse().expect("a name"), "1".parse().expect("a value"))]);
        let body = Full::new(Bytes::from("x")).with_trailers(async { Some(Ok(trailers)) });
        let answer = send(&app, request("POST", "/trailers", key, "").map(|_| Body::new(body))).await;
        assert_eq!(answer.body, "false");
    }
}

/// A request takes its place of a limit inside the layer when its body is there.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_silent_upload_holds_no_place_of_a_limit_inside(pool: PgPool) {
    create_effects(&pool).await;
    let inside = GlobalConcurrencyLimitLayer::new(1).layer(app_without_layer());
    let service = transactional(&pool).operation(|_| Some("limited".to_owned())).layer(inside);
    let silent = request("POST", "/effects", Some("silent"), "").map(|_| {
        let nothing = stream::pending::<Result<Bytes, std::io::Error>>();
        Body::from_stream(nothing)
    });
    let mut silent = Box::pin(service.clone().oneshot(silent));
    assert!(silent.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    for (method, status) in [("POST", StatusCode::CREATED), ("GET", StatusCode::OK)] {
        let stranger = service.clone().oneshot(request(method, "/effects", Some("stranger"), "x"));
        let answer = timeout(PATIENCE, stranger).await.expect("it does not wait for the silent one");
        assert_eq!(answer.expect("infallible").status(), status);
    }
}
