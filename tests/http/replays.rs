//! The parts of a response that a replay repeats.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::ACCESS_CONTROL_ALLOW_ORIGIN;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use http_body_util::BodyExt as _;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, NoTransaction};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE};
use serde_json::json;
use sqlx::PgPool;

use crate::support::{Answer, app, create_effects, effects, leased, post_to, request, send, transactional};

fn values<'a>(answer: &'a Answer, name: &str) -> Vec<&'a [u8]> {
    answer.headers.get_all(name).iter().map(|value| value.as_bytes()).collect()
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn headers_come_back_in_order_byte_by_byte_and_only_those_allowed(pool: PgPool) {
    create_effects(&pool).await;
    let request_id = HeaderName::from_static("x-request-id");
    let layer = transactional(&pool).replay_header(request_id.clone());
    let app = app(layer);
    let first = post_to(&app, "/headers", "key-1", "x").await;
    assert_eq!(values(&first, "set-cookie"), [b"session=1"], "the first response is untouched");
    let repeat = post_to(&app, "/headers", "key-1", "x").await;
    assert!(repeat.is_replayed());
    for name in ["content-type", "link", "etag", "location", "cache-control", "x-request-id"] {
        assert!(!values(&repeat, name).is_empty(), "{name}");
        assert_eq!(values(&repeat, name), values(&first, name), "{name}");
    }
    assert_eq!(values(&repeat, "link").len(), 2);
    assert_eq!(values(&repeat, "location"), [b"/caf\xe9"]);
    for name in ["set-cookie", "www-authenticate"] {
        assert!(values(&repeat, name).is_empty(), "{name}");
    }
}

/// A replay has the headers that describe the result, and no header that answers the first request, its connection or
/// its moment.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_replay_has_the_headers_that_describe_the_result(pool: PgPool) {
    const DESCRIBE: [&str; 12] = [
        "operation-location",
        "content-digest",
        "repr-digest",
        "content-security-policy",
        "x-content-type-options",
        "x-frame-options",
        "referrer-policy",
        "allow",
        "hx-redirect",
        "hx-trigger",
        "location",
        "content-location",
    ];
    const ANSWER: [&str; 12] = [
        "access-control-allow-origin",
        "access-control-allow-credentials",
        "access-control-expose-headers",
        "preference-applied",
        "timing-allow-origin",
        "alt-svc",
        "age",
        "server-timing",
        "ratelimit",
        "x-request-id",
        "via",
        "strict-transport-security",
    ];
    let answers = |status: StatusCode| {
        let names = DESCRIBE.iter().chain(&ANSWER).chain(&["retry-after"]);
        let headers: HeaderMap =
            names.map(|name| (HeaderName::from_static(name), HeaderValue::from_static("7"))).collect();
        post(async move |_tx: Result<IdempotentTx, NoTransaction>| (status, headers, "x"))
    };
    for layer in [transactional(&pool), leased(&pool, AT_MOST_ONCE)] {
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await.expect("empty");
        let layer = layer.store_errors([StatusCode::TOO_MANY_REQUESTS]);
        let routes = Router::new()
            .route("/done", answers(StatusCode::CREATED))
            .route("/later", answers(StatusCode::ACCEPTED))
            .route("/busy", answers(StatusCode::TOO_MANY_REQUESTS));
        let app = routes.layer(layer);
        for (path, retries) in [("/done", false), ("/later", true), ("/busy", false)] {
            let first = post_to(&app, path, "key-1", "x").await;
            assert!(ANSWER.iter().all(|name| first.headers.contains_key(*name)), "the first answer is untouched");
            let replay = post_to(&app, path, "key-1", "x").await;
            assert!(replay.is_replayed(), "{path}: {replay:?}");
            let has = |name: &&&str| replay.headers.contains_key(**name);
            assert_eq!(DESCRIBE.iter().filter(|name| !has(name)).count(), 0, "{path}: {replay:?}");
            assert_eq!(ANSWER.iter().filter(has).count(), 0, "{path}: {replay:?}");
            assert_eq!(replay.headers.contains_key("retry-after"), retries, "{path}");
        }
    }
}

/// A browser that retries from another origin gets the header for its own origin. With a header of the handler, the
/// browser would not show the replay.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_cors_layer_outside_answers_the_origin_of_each_request(pool: PgPool) {
    let cors = from_fn(async |request: Request, next: Next| {
        let origin = request.headers().get("origin").cloned();
        let mut response = next.run(request).await;
        response.headers_mut().extend(origin.map(|origin| (ACCESS_CONTROL_ALLOW_ORIGIN, origin)));
        response
    });
    create_effects(&pool).await;
    let app = app(transactional(&pool)).layer(cors);
    for (origin, replayed) in [("https://a.example", false), ("https://b.example", true)] {
        let mut request = request("POST", "/effects", Some("key-1"), "x");
        request.headers_mut().insert("origin", HeaderValue::from_static(origin));
        let answer = send(&app, request).await;
        assert_eq!(
            (answer.is_replayed(), &*values(&answer, "access-control-allow-origin")),
            (replayed, &[origin.as_bytes()][..])
        );
    }
}

/// Any stored status, any bytes that HTTP allows in headers and trailers, several of one name, any body. The trailers
/// are passed on, and a replay has none.
fn any_response() -> impl Strategy<Value = (StatusCode, HeaderMap, Vec<u8>, Option<HeaderMap>)> {
    const NAMES: [&str; 13] = [
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-location",
        "content-range",
        "content-type",
        "etag",
        "expires",
        "last-modified",
        "link",
        "location",
        "vary",
    ];
    let fields = || {
        let byte = prop_oneof![Just(b'\t'), Just(b'"'), Just(b'\\'), b' '..=b'~', 0x80_u8..=0xff];
        let field = (prop::sample::select(&NAMES[..]), prop::collection::vec(byte, 0..20));
        prop::collection::vec(field, 0..6).prop_map(|fields| {
            let fields = fields.into_iter().map(|(name, value)| {
                let value = HeaderValue::from_bytes(&value).expect("what HTTP lets through");
                (HeaderName::from_static(name), value)
            });
            fields.collect::<HeaderMap>()
        })
    };
    let status = (200_u16..500).prop_map(|status| StatusCode::from_u16(status).expect("a status"));
    let body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        any::<String>().prop_map(String::into_bytes),
        // Larger than the values that PostgreSQL keeps in the row itself.
        prop::collection::vec(any::<u8>(), 3000..9000),
    ];
    let trailers = prop::option::of(fields().prop_filter("some", |fields| !fields.is_empty()));
    (status, fields(), body, trailers)
}

/// Failing cases are not shrunk; the message has the whole case.
async fn any_response_comes_back(layer: IdempotencyLayer) {
    let layer = layer.store_errors((400..500).map(|status| StatusCode::from_u16(status).expect("a status")));
    let response = Arc::new(Mutex::new(None));
    let handler = {
        let response = response.clone();
        async move |_tx: Result<IdempotentTx, NoTransaction>| {
            let taken: Option<(StatusCode, HeaderMap, Vec<u8>, Option<HeaderMap>)> =
                response.lock().expect("no panic").take();
            let (status, headers, body, trailers) = taken.expect("performed once");
            let body = http_body_util::Full::new(Bytes::from(body));
            (status, headers, Body::new(body.with_trailers(async { trailers.map(Ok) })))
        }
    };
    let app = Router::new().route("/any", post(handler)).layer(layer);
    let mut runner = TestRunner::default();
    for case in 0..150 {
        let any = any_response().new_tree(&mut runner).expect("a case").current();
        let (status, headers, body, trailers) = any.clone();
        *response.lock().expect("no panic") = Some(any);
        for replayed in [false, true] {
            let mut answer = post_to(&app, "/any", &format!("key-{case}"), "x").await;
            let told = answer.headers.remove("idempotent-replayed").is_some();
            answer.headers.remove("content-length");
            answer.headers.remove("idempotency-key").expect("echoed");
            let trailers = trailers.as_ref().filter(|_| !replayed);
            let expected = (replayed, status, &headers, &body[..], trailers);
            let answered = (told, answer.status, &answer.headers, &answer.body[..], answer.trailers.as_ref());
            assert_eq!(answered, expected);
        }
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn any_response_comes_back_from_the_database_unchanged(pool: PgPool) {
    any_response_comes_back(transactional(&pool)).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn any_response_under_a_lease_comes_back_unchanged(pool: PgPool) {
    any_response_comes_back(leased(&pool, AT_MOST_ONCE)).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_that_is_too_large_is_sent_once_and_never_performed_again(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).response_limit(1000));
    for (bytes, kept) in [(1000, true), (1001, false), (300_000, false)] {
        let (uri, key) = (format!("/large/{bytes}"), format!("key-{bytes}"));
        let first = post_to(&app, &uri, &key, "x").await;
        assert_eq!((first.status, first.body.len()), (StatusCode::OK, bytes));
        let repeat = post_to(&app, &uri, &key, "x").await;
        if kept {
            assert_eq!((repeat.is_replayed(), repeat.body.len()), (true, bytes));
        } else {
            assert_eq!((repeat.status, &*repeat.problem()), (StatusCode::CONFLICT, "not-replayable"));
        }
    }
    assert_eq!(effects(&pool).await, 3);
}

/// Whatever a newer release or a person has left in the columns, the answer is a replay or a rejection, and no panic.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn any_record_makes_an_answer(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    post_to(&app, "/effects", "key-1", "x").await;
    let text = || prop_oneof![Just("etag".to_owned()), Just("trailer".to_owned()), "[^\0]{0,10}"];
    let fields = prop::collection::vec(prop::collection::vec(text(), 0..4), 0..4);
    let headers = prop_oneof![
        fields.prop_map(|fields| json!(fields)),
        text().prop_map(|text| json!({ text.as_str(): [text] })),
        prop::collection::vec(text(), 0..4).prop_map(|texts| json!(texts)),
        any::<i32>().prop_map(|number| json!(number)),
    ];
    let status = prop_oneof![any::<i16>(), 100_i16..1000];
    let bytes = prop::collection::vec(any::<u8>(), 0..64);
    let any = (prop::option::of(headers), prop::option::of(status), prop::option::of(bytes));
    let mut runner = TestRunner::default();
    for _ in 0..150 {
        let (headers, status, body): (_, Option<i16>, Option<Vec<u8>>) =
            any.new_tree(&mut runner).expect("a case").current();
        let headers = headers.map(|headers| headers.to_string());
        sqlx::query(
            "update idempotency.record set response_headers = $1::jsonb, response_status = $2, response_body = $3",
        )
        .bind(&headers)
        .bind(status)
        .bind(&body)
        .execute(&pool)
        .await
        .expect("spoilt");
        let answer = post_to(&app, "/effects", "key-1", "x").await;
        assert!(answer.is_replayed() || answer.problem() == "not-replayable", "{headers:?} {status:?}: {answer:?}");
    }
    assert_eq!(effects(&pool).await, 1);
}

/// The handler passes on a response that another service has replayed.
async fn a_first_response_is_no_replay(layer: IdempotencyLayer) {
    let handler = async |_tx: Result<IdempotentTx, NoTransaction>, headers: HeaderMap| {
        let status = if headers.contains_key("x-fail") { StatusCode::BAD_REQUEST } else { StatusCode::OK };
        (status, [("idempotent-replayed", "true")], "performed")
    };
    let app = Router::new().route("/claims", post(handler)).layer(layer.optional_key(true));
    let mut failing = request("POST", "/claims", Some("key-1"), "x");
    failing.headers_mut().insert("x-fail", HeaderValue::from_static("yes"));
    for request in [failing, request("POST", "/claims", Some("key-1"), "x"), request("POST", "/claims", None, "x")] {
        let first = send(&app, request).await;
        assert_eq!(first.body, "performed");
        assert!(!first.headers.contains_key("idempotent-replayed"), "{first:?}");
    }
    assert_eq!(values(&post_to(&app, "/claims", "key-1", "x").await, "idempotent-replayed"), [b"true"]);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_first_response_never_says_that_it_is_a_replay(pool: PgPool) {
    a_first_response_is_no_replay(transactional(&pool)).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_first_response_under_a_lease_never_says_that_it_is_a_replay(pool: PgPool) {
    a_first_response_is_no_replay(leased(&pool, AT_LEAST_ONCE)).await;
}
