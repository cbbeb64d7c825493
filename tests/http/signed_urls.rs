//! Signed URLs, whose signature differs in each attempt.

use axum::Router;
use axum::extract::{OriginalUri, Request};
use axum::http::{StatusCode, Uri};
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use pg_idempotency::http::IdempotentTx;
use sqlx::PgPool;
use tower::{Service, ServiceExt as _};

use crate::support::{create_effects, effects, insert, request, transactional};

#[path = "../../src/guide/http/signed_urls.rs"]
mod shown;

/// The status, and whether the answer is a replay.
async fn ask<S>(app: &S, uri: &str) -> (StatusCode, bool)
where
    S: Service<Request, Response = axum::response::Response, Error = std::convert::Infallible> + Clone,
{
    let answer = app.clone().oneshot(request("POST", uri, Some("key-1"), "x")).await.expect("infallible");
    (answer.status(), answer.headers().contains_key("idempotent-replayed"))
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_middleware_around_the_router_removes_the_signature(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx, uri: Uri, OriginalUri(original): OriginalUri| {
        insert(&mut tx, &format!("{uri} {original}")).await;
    };
    let routes = || Router::new().nest("/v1", Router::new().route("/files", post(handler)));
    let app = shown::without_signature(routes().layer(transactional(&pool)));
    for (uri, expected) in [
        ("/v1/files?expires=1&size=7&signature=a%3D", (StatusCode::OK, false)),
        ("/v1/files?expires=2&size=7&signature=b%3D", (StatusCode::OK, true)),
        ("/v1/files?size=7", (StatusCode::OK, true)),
        ("/v1/files?size=8&signature=b%3D", (StatusCode::UNPROCESSABLE_ENTITY, false)),
        ("/v1/files?signature=b%3D", (StatusCode::UNPROCESSABLE_ENTITY, false)),
    ] {
        assert_eq!(ask(&app, uri).await, expected, "{uri}");
    }
    let note: String = sqlx::query_scalar("select note from effect").fetch_one(&pool).await.expect("one");
    assert_eq!(note, "/files?size=7 /v1/files?size=7");

    // A middleware of the Router is too late: the layer compares the URI that the Router has received.
    let late = from_fn(async |mut request: Request, next: Next| {
        *request.uri_mut() = request.uri().path().parse().expect("a URI");
        next.run(request).await
    });
    let app = routes().layer(transactional(&pool)).layer(late);
    sqlx::raw_sql("truncate idempotency.record").execute(&pool).await.expect("empty");
    assert_eq!(ask(&app, "/v1/files?signature=a").await, (StatusCode::OK, false));
    assert_eq!(ask(&app, "/v1/files?signature=b").await, (StatusCode::UNPROCESSABLE_ENTITY, false));
    assert_eq!(effects(&pool).await, 2);
}
