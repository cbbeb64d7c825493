//! Requests: their key, their default fingerprint, their operation and their body, also as few clients send them.

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
    Announcing, app, app_without_layer, create_effects, effects, post_to, recorded, records, request, send,
    transactional, user,
};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn path_query_and_body_are_in_the_fingerprint_and_the_content_type_is_not(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let with_type = |uri, content_type: &str, body| {
        let mut request = request("POST", uri, Some("key-1"), body);
        request.headers_mut().insert("content-type", content_type.parse().expect("a value"));
        request
    };
    assert_eq!(send(&app, with_type("/accounts/1/effects?a=1", "text/plain", "x")).await.status, StatusCode::CREATED);
    for content_type in ["text/plain", "text/plain; charset=utf-8"] {
        assert!(send(&app, with_type("/accounts/1/effects?a=1", content_type, "x")).await.is_replayed());
    }
    assert!(post_to(&app, "/accounts/1/effects?a=1", "key-1", "x").await.is_replayed(), "without one");
    for other in [
        with_type("/accounts/2/effects?a=1", "text/plain", "x"),
        with_type("/accounts/1/effects?a=2", "text/plain", "x"),
        with_type("/accounts/1/effects", "text/plain", "x"),
        with_type("/accounts/1/effects?a=1", "text/plain", "x "),
    ] {
        let refused = send(&app, other).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::UNPROCESSABLE_ENTITY, "key-reused"));
    }
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_nested_router_does_not_hide_the_account_in_the_path(pool: PgPool) {
    create_effects(&pool).await;
    let app = Router::new().nest("/tenants/{id}", app(transactional(&pool)));
    assert_eq!(post_to(&app, "/tenants/1/effects", "key-1", "x").await.status, StatusCode::CREATED);
    assert_eq!(post_to(&app, "/tenants/2/effects", "key-1", "x").await.problem(), "key-reused");
    assert_eq!(recorded::<String>(&pool, "operation").await, "POST /tenants/{}/effects");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_method_and_route_is_an_operation_of_its_own(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    for (method, uri) in [("POST", "/effects"), ("PATCH", "/effects"), ("POST", "/accounts/1/effects")] {
        let answer = send(&app, request(method, uri, Some("key-1"), "x")).await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::CREATED, false), "{method} {uri}");
    }
    assert_eq!(effects(&pool).await, 3);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_over_the_limit_claims_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).request_limit(10));
    assert_eq!(post_to(&app, "/effects", "key-1", "0123456789").await.status, StatusCode::CREATED);
    let announced = request("POST", "/effects", Some("key-2"), "0123456789a");
    let chunks = ["01234", "56789", "a"].map(Ok::<_, std::io::Error>);
    let unannounced =
        request("POST", "/effects", Some("key-2"), "").map(|_| Body::from_stream(futures_util::stream::iter(chunks)));
    for request in [announced, unannounced] {
        let refused = send(&app, request).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large"));
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_that_breaks_off_or_is_shorter_than_it_announced_claims_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).optional_key(true));
    let broken = request("POST", "/effects", Some("key-1"), "").map(|_| {
        let parts = [Ok("half of it"), Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset))];
        Body::from_stream(futures_util::stream::iter(parts))
    });
    assert_eq!(send(&app, broken).await.problem(), "broken-body");
    for (number, key) in [Some("key-1"), None].into_iter().enumerate() {
        let announcing = |length| {
            let data = Some(Bytes::from_static(b"amount=1"));
            request("POST", "/effects", key, "").map(|_| Body::new(Announcing { data, length }))
        };
        let refused = send(&app, announcing(9)).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::BAD_REQUEST, "broken-body"));
        assert_eq!((effects(&pool).await, records(&pool).await), (i64::from(number == 1), i64::from(number == 1)));
        assert_eq!(send(&app, announcing(8)).await.status, StatusCode::CREATED);
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (2, 1));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_in_chunks_is_the_same_request_and_reaches_the_handler_whole(pool: PgPool) {
    let app = app(transactional(&pool));
    let chunked = || {
        let chunks = ["ab", "", "c"].map(Ok::<_, std::io::Error>);
        request("POST", "/echo", Some("key-1"), "").map(|_| Body::from_stream(futures_util::stream::iter(chunks)))
    };
    assert_eq!(send(&app, chunked()).await.body, "abc");
    let whole = post_to(&app, "/echo", "key-1", "abc").await;
    assert_eq!((whole.is_replayed(), &*whole.body), (true, &b"abc"[..]));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn without_a_matched_route_the_service_must_name_the_operation(pool: PgPool) {
    use tower::{Layer as _, ServiceExt as _};
    create_effects(&pool).await;
    // Outside the router no route has matched yet.
    let in_front = transactional(&pool).layer(app_without_layer());
    let refused = in_front.oneshot(request("POST", "/effects", Some("key-1"), "x")).await.expect("infallible");
    assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let named = transactional(&pool).operation(|parts| Some(parts.uri.path().to_owned())).layer(app_without_layer());
    let answer = named.oneshot(request("POST", "/effects", Some("key-1"), "x")).await.expect("infallible");
    assert_eq!(answer.status(), StatusCode::CREATED);
    assert_eq!(recorded::<String>(&pool, "operation").await, "/effects");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_key_that_nobody_can_see_is_malformed(pool: PgPool) {
    create_effects(&pool).await;
    let from_header = app(transactional(&pool));
    for key in ["\" \"", "\"   \""] {
        assert_eq!(post_to(&from_header, "/effects", key, "x").await.problem(), "malformed-key", "{key:?}");
    }
    let from_body = app(transactional(&pool).key_from(|_, body| Ok(Some(String::from_utf8_lossy(body).into_owned()))));
    for body in [" ", "\u{a0}", "\u{200b}\u{feff}"] {
        let refused = send(&from_body, request("POST", "/effects", None, body)).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::BAD_REQUEST, "malformed-key"), "{body:?}");
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_key_that_is_shorter_than_the_service_takes_is_malformed(pool: PgPool) {
    create_effects(&pool).await;
    let layer = transactional(&pool).shortest_key(8);
    let from_header = app(layer.clone());
    for (key, problem) in [("1234567", "malformed-key"), ("\"1234567\"", "malformed-key"), ("12345678", "")] {
        let answer = post_to(&from_header, "/effects", key, "x").await;
        if problem.is_empty() {
            assert_eq!(answer.status, StatusCode::CREATED, "{key}");
        } else {
            assert_eq!((answer.status, &*answer.problem()), (StatusCode::BAD_REQUEST, problem), "{key}");
        }
    }
    // Characters count, and not bytes.
    let from_body = app(layer.key_from(|_, body| Ok(Some(String::from_utf8_lossy(body).into_owned()))));
    let refused = send(&from_body, request("POST", "/effects", None, "\u{e4}\u{e4}\u{e4}\u{e4}")).await;
    assert_eq!(refused.problem(), "malformed-key");
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
}

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
