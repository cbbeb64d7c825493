//! The layers of src/guide/axum.md around ours, in its order.

use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use pg_idempotency::http::{IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED};
use pg_idempotency::testing::PATIENCE;
use sqlx::PgPool;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::{Any, CorsLayer};
use tower_http::{timeout::TimeoutLayer, trace::TraceLayer};

use crate::support::{app_without_layer, create_effects, effects, post_to, request, send, transactional};

async fn authenticate(headers: HeaderMap, request: Request, next: Next) -> Result<Response, StatusCode> {
    let known = headers.contains_key("x-user");
    if known { Ok(next.run(request).await) } else { Err(StatusCode::UNAUTHORIZED) }
}

fn around(app: Router, limit: Duration) -> Router {
    let cors = CorsLayer::new()
        .allow_origin(Any)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE, IDEMPOTENCY_KEY])
        .expose_headers([IDEMPOTENT_REPLAYED, header::RETRY_AFTER]);
    app.layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, limit))
        .layer(CatchPanicLayer::new())
        .layer(CompressionLayer::new())
        .layer(cors)
        .layer(TraceLayer::new_for_http())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_page_may_send_the_key_and_see_the_replay(pool: PgPool) {
    create_effects(&pool).await;
    let app = app_without_layer().route_layer(transactional(&pool)).route_layer(middleware::from_fn(authenticate));
    let app = around(app, PATIENCE);

    // A browser asks without the user's identity.
    let mut preflight = request("OPTIONS", "/effects", None, "");
    for (name, value) in [
        ("origin", "https://shop.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "idempotency-key"),
    ] {
        preflight.headers_mut().insert(name, value.parse().expect("a value"));
    }
    let allowed = send(&app, preflight).await;
    assert_eq!(allowed.status, StatusCode::OK);
    let headers = allowed.headers["access-control-allow-headers"].to_str().expect("text");
    assert!(headers.contains("idempotency-key"), "{headers}");

    for replayed in [false, true] {
        let mut post = request("POST", "/effects", Some("key-1"), "x");
        post.headers_mut().insert("origin", "https://shop.example".parse().expect("a value"));
        post.headers_mut().insert("x-user", "ada".parse().expect("a value"));
        let answer = send(&app, post).await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::CREATED, replayed));
        let headers = answer.headers["access-control-expose-headers"].to_str().expect("text");
        assert!(headers.contains("idempotent-replayed"), "{headers}");
    }
    assert_eq!(send(&app, request("POST", "/effects", Some("key-1"), "x")).await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_compressed_answer_is_stored_uncompressed(pool: PgPool) {
    create_effects(&pool).await;
    let app = around(app_without_layer().route_layer(transactional(&pool)), PATIENCE);
    let mut first = request("POST", "/large/1000", Some("key-1"), "");
    first.headers_mut().insert("accept-encoding", "gzip".parse().expect("a value"));
    let first = send(&app, first).await;
    assert_eq!(first.headers["content-encoding"], "gzip");

    let replay = post_to(&app, "/large/1000", "key-1", "").await;
    assert!(replay.is_replayed() && !replay.headers.contains_key("content-encoding"), "{replay:?}");
    assert_eq!(replay.body, vec![b'x'; 1000]);
}
