//! The rules of the draft: which requests are covered, and which answers they get.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{Method, StatusCode};
use axum::routing::get;
use pg_idempotency::http::IdempotentTx;
use rig::cases::each;
use rig::lease::AT_MOST_ONCE;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::support::{app, create_effects, effects, insert, leased, post_to, records, request, send, transactional};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_first_request_performs_and_a_repeat_gets_its_answer(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let first = post_to(&app, "/effects", "key-1", "x").await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert!(!first.headers.contains_key("idempotent-replayed"));
    for _ in 0..3 {
        let repeat = post_to(&app, "/effects", "key-1", "x").await;
        assert!(repeat.is_replayed());
        assert_eq!((repeat.status, &repeat.body), (first.status, &first.body));
        assert_eq!(repeat.headers["location"], first.headers["location"]);
    }
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_missing_key_is_refused_where_one_is_required(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let missing = send(&app, request("POST", "/effects", None, "x")).await;
    assert_eq!((missing.status, &*missing.problem()), (StatusCode::BAD_REQUEST, "missing-key"));
    assert_eq!(effects(&pool).await, 0);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_optional_key_leaves_requests_without_one_unprotected(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).optional_key(true));
    for _ in 0..2 {
        let answer = send(&app, request("POST", "/effects", None, "x")).await;
        assert_eq!(answer.status, StatusCode::CREATED);
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (2, 0));
    // An empty key is malformed, not missing.
    assert_eq!(post_to(&app, "/effects", "", "x").await.problem(), "malformed-key");
    // The transaction is committed or rolled back as with a key.
    let refused = send(&app, request("POST", "/status/400", None, "x")).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    let swallowed = send(&app, request("POST", "/swallow", None, "x")).await;
    assert_eq!(swallowed.problem(), "misconfigured", "a lost effect must not be acknowledged");
    assert_eq!(effects(&pool).await, 2);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_the_chosen_methods_are_covered(pool: PgPool) {
    create_effects(&pool).await;
    let by_default = app(transactional(&pool));
    assert_eq!(send(&by_default, request("GET", "/effects", None, "")).await.body, "read");
    for _ in 0..2 {
        assert_eq!(
            send(&by_default, request("PATCH", "/effects", Some("key-1"), "x")).await.status,
            StatusCode::CREATED
        );
    }
    assert_eq!(effects(&pool).await, 1);
    // The layer does not cover the method, so the handler has no transaction.
    let uncovered = send(&by_default, request("PUT", "/effects", Some("key-1"), "x")).await;
    assert_eq!(uncovered.status, StatusCode::INTERNAL_SERVER_ERROR);
    let with_put = app(transactional(&pool).methods([Method::PUT]));
    for _ in 0..2 {
        assert_eq!(send(&with_put, request("PUT", "/effects", Some("key-1"), "x")).await.status, StatusCode::CREATED);
    }
    assert_eq!(effects(&pool).await, 2);
}

/// axum answers HEAD by the handler of GET.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_covered_get_needs_its_head_covered(pool: PgPool) {
    create_effects(&pool).await;
    let once = async |mut tx: IdempotentTx| insert(&mut tx, "read").await.to_string();
    let covering = |methods: &[Method]| {
        let layer = transactional(&pool).methods(methods.iter().cloned());
        Router::new().route("/once", get(once)).route_layer(layer)
    };
    let head = || request("HEAD", "/once", Some("key-1"), "");
    let uncovered = send(&covering(&[Method::GET]), head()).await;
    assert_eq!(uncovered.status, StatusCode::INTERNAL_SERVER_ERROR, "it finds no transaction");
    assert_eq!(effects(&pool).await, 0);
    let covered = covering(&[Method::GET, Method::HEAD]);
    for replayed in [false, true] {
        let answer = send(&covered, head()).await;
        assert_eq!((answer.status, answer.is_replayed(), &*answer.body), (StatusCode::OK, replayed, &b""[..]));
    }
    let get = send(&covered, request("GET", "/once", Some("key-1"), "")).await;
    assert_eq!((get.is_replayed(), &*get.body), (false, &b"2"[..]), "an operation of its own");
    assert_eq!(effects(&pool).await, 2);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn two_users_with_one_key_do_not_see_each_other(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    for name in ["ada", "bob"] {
        let mut request = request("POST", "/effects", Some("key-1"), "x");
        request.headers_mut().insert("x-user", name.parse().expect("a value"));
        let answer = send(&app, request).await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::CREATED, false));
    }
    assert_eq!(effects(&pool).await, 2);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_of_the_scope_is_the_first_answer(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    for key in [Some("key-1"), Some(""), None] {
        let mut request = request("POST", "/effects", key, "x");
        request.headers_mut().insert("x-user", "nobody".parse().expect("a value"));
        let answer = send(&app, request).await;
        assert_eq!((answer.status, &*answer.body), (StatusCode::UNAUTHORIZED, &b"who are you?"[..]));
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn without_a_database_the_handler_never_runs_unprotected(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).optional_key(true));
    pool.close().await;
    for key in [Some("key-1"), None] {
        let answer = send(&app, request("POST", "/effects", key, "x")).await;
        assert_eq!((answer.status, &*answer.problem()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"));
        assert_eq!(answer.headers["retry-after"], "1");
    }
}

/// A server that refuses connections is asked again until the pool's time is over.
#[tokio::test]
async fn without_a_server_the_answer_comes_after_the_time_of_the_pool() {
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = nobody.local_addr().expect("an address").port();
    drop(nobody);
    let limit = Duration::from_millis(500);
    let options = PgConnectOptions::new().host("127.0.0.1").port(port).username("nobody");
    let pool = PgPoolOptions::new().acquire_timeout(limit).connect_lazy_with(options);
    let policy = AT_MOST_ONCE;
    each([("transaction", transactional(&pool)), ("lease", leased(&pool, policy))], async |(name, layer)| {
        let app = app(layer);
        let started = Instant::now();
        let answer = send(&app, request("POST", "/effects", Some("key-1"), "x")).await;
        assert_eq!((answer.status, &*answer.problem()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"), "{name}");
        assert!(started.elapsed() < 10 * limit, "{name}: {:?}", started.elapsed());
        Ok(())
    })
    .await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_service_may_choose_the_form_of_rejections(pool: PgPool) {
    create_effects(&pool).await;
    let own = app(transactional(&pool).on_rejection(|rejection| {
        let mut response = axum::http::Response::new(rejection.kind().into());
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    }));
    let answer = send(&own, request("POST", "/effects", None, "x")).await;
    assert_eq!((answer.status, &*answer.body), (StatusCode::IM_A_TEAPOT, &b"missing-key"[..]));
    assert_eq!(answer.rejection.expect("in the extensions").kind(), "missing-key");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_key_may_come_from_the_body(pool: PgPool) {
    create_effects(&pool).await;
    let from_body = transactional(&pool).key_from(|_, body| {
        let order: Option<serde_json::Value> = serde_json::from_slice(body).ok();
        Ok(order.and_then(|order| Some(order["reference"].as_str()?.to_owned())))
    });
    let app = app(from_body);
    for replayed in [false, true] {
        let answer = send(&app, request("POST", "/effects", None, r#"{"reference":"r-17"}"#)).await;
        assert_eq!(answer.is_replayed(), replayed, "{answer:?}");
    }
    for (body, problem) in [(r#"{"reference":"line\nbreak"}"#, "malformed-key"), ("{}", "missing-key")] {
        assert_eq!(send(&app, request("POST", "/effects", None, body)).await.problem(), problem, "{body}");
    }
    assert_eq!(effects(&pool).await, 1);
}
