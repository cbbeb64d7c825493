//! The default fingerprint of a request, its operation, and its body.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use sqlx::PgPool;

use crate::support::{
    app, app_without_layer, create_effects, effects, post_to, recorded, records, request, send, transactional,
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
async fn a_body_that_breaks_off_claims_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let broken = request("POST", "/effects", Some("key-1"), "").map(|_| {
        let parts = [Ok("half of it"), Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset))];
        Body::from_stream(futures_util::stream::iter(parts))
    });
    let refused = send(&app, broken).await;
    assert_eq!((refused.status, &*refused.problem()), (StatusCode::BAD_REQUEST, "broken-body"));
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// One chunk of data. The announced length stays the same to the end, as it does in many bodies that are written by
/// hand.
struct Announcing {
    data: Option<Bytes>,
    length: u64,
}

impl http_body::Body for Announcing {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.data.take().map(|data| Ok(http_body::Frame::data(data))))
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.length)
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_shorter_than_it_announced_claims_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).optional_key(true));
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
