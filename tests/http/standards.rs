//! The lines of the table in `docs/standards.md` that no other test shows. The table names a test for each line.

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use axum::routing::{post, put};
use pg_idempotency::Key;
use pg_idempotency::http::{IDEMPOTENCY_KEY, IdempotentTx, Rejection, problem};
use pg_idempotency::testing::expire;
use rig::cases::each;
use rig::gate::Gate;
use serde_json::json;
use sqlx::PgPool;

use crate::support::{
    Answer, app, create_effects, effects, insert, post_to, recorded, records, request, send, stops_at, transactional,
};

fn echoed(answer: &Answer) -> Vec<&str> {
    answer.headers.get_all(IDEMPOTENCY_KEY).iter().map(|key| key.to_str().expect("ASCII")).collect()
}

/// In the form in which the request had it, whatever the answer is. The record does not have it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_answer_to_a_request_with_a_key_echoes_the_key(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let app = stops_at(&gate).layer(transactional(&pool)).merge(app(transactional(&pool)));
    let first = tokio::spawn({
        let app = app.clone();
        async move { post_to(&app, "/gate", "\"key-1\"", "x").await }
    });
    gate.reached().await;
    let in_flight = post_to(&app, "/gate", "key-1", "x").await;
    assert_eq!((&*in_flight.problem(), echoed(&in_flight)), ("in-flight", vec!["key-1"]));
    gate.open();
    assert_eq!(echoed(&first.await.expect("joined")), ["\"key-1\""]);
    let replay = post_to(&app, "/gate", "key-1", "x").await;
    assert_eq!((replay.is_replayed(), echoed(&replay)), (true, vec!["key-1"]), "this request's form of the key");
    for (uri, key, body, status) in [
        ("/gate", "key-1", "y", StatusCode::UNPROCESSABLE_ENTITY),
        ("/status/402", "key-2", "x", StatusCode::PAYMENT_REQUIRED),
        ("/effects", "a b", "x", StatusCode::BAD_REQUEST),
    ] {
        let answer = post_to(&app, uri, key, body).await;
        assert_eq!((answer.status, echoed(&answer)), (status, vec![key]));
    }
    let mut refused_by_the_scope = request("POST", "/effects", Some("key-3"), "x");
    refused_by_the_scope.headers_mut().insert("x-user", HeaderValue::from_static("nobody"));
    let refused = send(&app, refused_by_the_scope).await;
    assert_eq!((refused.status, echoed(&refused)), (StatusCode::UNAUTHORIZED, vec!["key-3"]));

    let stored: bool =
        sqlx::query_scalar("select bool_or(response_headers::text like '%idempotency%') from idempotency.record")
            .fetch_one(&pool)
            .await
            .expect("records");
    assert!(!stored);
    let mut several = request("POST", "/effects", Some("key-4"), "x");
    several.headers_mut().append(IDEMPOTENCY_KEY, HeaderValue::from_static("key-5"));
    for without_a_key in [request("POST", "/effects", None, "x"), several] {
        assert!(echoed(&send(&app, without_a_key).await).is_empty());
    }
    // Each character of the longest key is escaped. No longer form is a key.
    let longest = format!("\"{}\"", "\\\"".repeat(255));
    assert_eq!(echoed(&post_to(&app, "/effects", &longest, "x").await), [&longest]);
    let too_long = post_to(&app, "/effects", &"x".repeat(513), "x").await;
    assert_eq!((&*too_long.problem(), echoed(&too_long)), ("malformed-key", vec![]));
    // The layer does not cover the method.
    assert!(echoed(&send(&app, request("GET", "/effects", Some("key-1"), "")).await).is_empty());
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_key_from_another_place_is_not_echoed_and_the_echo_of_another_service_is_replaced(pool: PgPool) {
    let passed_on =
        async |_: IdempotentTx, headers: HeaderMap| ([(IDEMPOTENCY_KEY, "downstream")], headers.len().to_string());
    let router =
        || Router::new().route("/passed-on", post(passed_on)).route("/none", post(async |_: IdempotentTx| "done"));
    let of_header = router().layer(transactional(&pool));
    let answer = post_to(&of_header, "/passed-on", "key-1", "x").await;
    assert_eq!(echoed(&answer), ["key-1"]);
    assert!(!format!("{:?}", answer.headers).contains("key-1"), "no log of the headers shows it");
    let of_body = router().layer(transactional(&pool).key_from(|_, _| Ok(Some("of the body".to_owned()))));
    assert!(echoed(&post_to(&of_body, "/none", "key-1", "x").await).is_empty());
}

/// The agentic-commerce protocol scopes keys to the path. The default scopes them to the matched route, and then
/// another path is another request.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn with_the_path_as_operation_the_same_key_on_another_path_is_independent(pool: PgPool) {
    create_effects(&pool).await;
    let by_path = transactional(&pool).operation(|parts| Some(format!("{} {}", parts.method, parts.uri.path())));
    let cases = [(app(transactional(&pool)), StatusCode::UNPROCESSABLE_ENTITY), (app(by_path), StatusCode::CREATED)];
    each(cases, async |(app, other)| {
        assert_eq!(post_to(&app, "/accounts/1/effects", "key-1", "x").await.status, StatusCode::CREATED);
        assert_eq!(post_to(&app, "/accounts/2/effects", "key-1", "x").await.status, other);
        assert!(post_to(&app, "/accounts/1/effects", "key-1", "x").await.is_replayed());
        Ok(())
    })
    .await;
    assert_eq!(effects(&pool).await, 3);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn in_canonical_json_trailing_zeros_are_equal_and_null_is_not_absent(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).canonical_json([]));
    assert_eq!(post_to(&app, "/effects", "key-1", r#"{"a":1.0,"b":[1,2]}"#).await.status, StatusCode::CREATED);
    for same in [r#"{"a":1,"b":[1,2]}"#, r#"{ "b": [1.00, 2e0], "a": 1 }"#] {
        assert!(post_to(&app, "/effects", "key-1", same).await.is_replayed(), "{same}");
    }
    for other in [r#"{"a":1,"b":[2,1]}"#, r#"{"a":1,"b":[1,2],"c":null}"#, r#"{"a":"1","b":[1,2]}"#] {
        assert_eq!(post_to(&app, "/effects", "key-1", other).await.problem(), "key-reused", "{other}");
    }
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_key_lives_for_a_day_and_is_then_a_new_request(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED);
    let a_day = "expires_at - claimed_at between interval '24 h' and interval '24 h 5 min'";
    assert!(recorded::<bool>(&pool, a_day).await);
    let key = Key::new("ada", "POST /effects", "key-1").expect("a key");
    expire(&pool, &key).await.expect("expired");
    let new = post_to(&app, "/effects", "key-1", "another body").await;
    assert_eq!((new.status, new.is_replayed()), (StatusCode::CREATED, false));
    assert_eq!((effects(&pool).await, records(&pool).await), (2, 1));
}

/// The conformance suite of the Universal Commerce Protocol: the same answer for a repeat, and 409 for another body, on
/// `POST /checkout-sessions` and on `PUT /checkout-sessions/{id}`.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_reused_key_can_be_a_409_on_post_and_put(pool: PgPool) {
    create_effects(&pool).await;
    let change = async |mut tx: IdempotentTx, body: String| insert(&mut tx, &body).await.to_string();
    let layer = transactional(&pool).methods([Method::POST, Method::PUT]).on_rejection(|rejection| {
        let mut response = problem(rejection);
        if matches!(rejection, Rejection::KeyReused) {
            response = Response::new(Bytes::from(json!({ "code": rejection.kind() }).to_string()));
            *response.status_mut() = StatusCode::CONFLICT;
        }
        response
    });
    let sessions =
        Router::new().route("/checkout-sessions", post(change)).route("/checkout-sessions/{id}", put(change));
    let app = sessions.route_layer(layer);
    for (method, uri) in [("POST", "/checkout-sessions"), ("PUT", "/checkout-sessions/7")] {
        let first = send(&app, request(method, uri, Some("key-1"), "x")).await;
        let repeat = send(&app, request(method, uri, Some("key-1"), "x")).await;
        assert_eq!((repeat.status, &repeat.body, repeat.is_replayed()), (first.status, &first.body, true), "{method}");
        let conflict = send(&app, request(method, uri, Some("key-1"), "y")).await;
        assert_eq!(
            (conflict.status, &*conflict.body),
            (StatusCode::CONFLICT, &br#"{"code":"key-reused"}"#[..]),
            "{method}"
        );
    }
    assert_eq!(effects(&pool).await, 2);
}
