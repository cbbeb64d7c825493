//! Stored HTTP responses that a fixture writes (feature `testing`).

use axum::http::{Request, Response, StatusCode};
use pg_idempotency::Key;
use pg_idempotency::testing::Fixture;
use sqlx::PgPool;

use crate::support::{app, create_effects, effects, request, send, transactional};

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_response_from_a_fixture_is_replayed_to_the_same_request(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let key = Key::new("ada", "POST /accounts/{id}/effects", "key-1")?;
    let first = Request::post("/accounts/7/effects?fast=yes").header("content-type", "text/plain").body("tea")?;
    let response = Response::builder()
        .status(StatusCode::CREATED)
        .header("location", "/effects/1")
        .header("set-cookie", "session=1")
        .body(&b"\xff1"[..])?;
    Fixture::answered(&key, &first, &response)?.write(&pool).await?;

    let app = app(transactional(&pool));
    let mut repeat = request("POST", "/accounts/7/effects?fast=yes", Some("key-1"), "tea");
    repeat.headers_mut().insert("content-type", "text/plain".parse()?);
    let answer = send(&app, repeat).await;
    assert_eq!((answer.status, answer.is_replayed()), (StatusCode::CREATED, true), "{answer:?}");
    assert_eq!(answer.headers["location"], "/effects/1");
    assert!(!answer.headers.contains_key("set-cookie"), "as in life, not every header is stored");
    assert_eq!(answer.body, &b"\xff1"[..]);

    for (uri, body, content_type) in [
        ("/accounts/7/effects", "tea", "text/plain"),
        ("/accounts/8/effects?fast=yes", "tea", "text/plain"),
        ("/accounts/7/effects?fast=yes", "milk", "text/plain"),
        ("/accounts/7/effects?fast=yes", "tea", "application/json"),
    ] {
        let mut other = request("POST", uri, Some("key-1"), body);
        other.headers_mut().insert("content-type", content_type.parse()?);
        assert_eq!(send(&app, other).await.problem(), "key-reused", "{uri} {body}");
    }
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}
