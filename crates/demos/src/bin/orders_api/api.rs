//! The routes, and the checks that a request passes before it takes a key.

use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequest as _, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, patch, post};
use demos::problem::Problem;
use pg_idempotency::Idempotency;
use pg_idempotency::http::{Denied, IdempotencyLayer, method_not_allowed};
use pg_idempotency::lease::{LeaseOptions, Policy};
use sqlx::PgPool;
use standardwebhooks::Webhook;

use crate::orders::{Service, User};
use crate::{orders, text};

/// An order is a few hundred bytes.
pub(crate) const BODY_LIMIT: usize = 16 * 1024;

/// The secret that the app and the service share. The requests are signed as Standard Webhooks signs deliveries.
pub(crate) fn secret() -> Webhook {
    Webhook::from_bytes(b"a real one is not a constant".to_vec()).expect("any bytes are a secret")
}

/// Far longer than the gateway takes. The layer renews it while the handler runs, so this is the delay after a crash.
const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: Duration::from_secs(40) };

pub(crate) fn router(service: Service) -> anyhow::Result<Router> {
    let pool = service.pool.clone();
    // DELETE is idempotent in HTTP, but its response is not. With a key, the repeat gets the first response.
    let transactional = IdempotencyLayer::transactional(pool.clone(), Idempotency::new(), scope).methods([
        Method::POST,
        Method::PATCH,
        Method::DELETE,
    ]);
    let in_the_database = Router::new()
        .route("/orders", get(orders::list).post(orders::create))
        .route("/orders/{id}", patch(orders::redirect).delete(orders::cancel))
        .route("/orders/{id}/complete", post(orders::complete))
        .route_layer(transactional);
    let leased = IdempotencyLayer::leased(pool.clone(), LeaseOptions::new(AT_MOST_ONCE), scope);
    let outside = Router::new()
        .route("/orders/{id}/text", post(text::send))
        .method_not_allowed_fallback(method_not_allowed)
        .route_layer(leased);

    // The last layer comes first. A replay passes all of them again, so a passenger whose token was revoked learns
    // nothing. A request that one of them refuses takes no key.
    Ok(in_the_database
        .merge(outside)
        .layer(from_fn(check_signature)) // 3. reads the body,
        .layer(DefaultBodyLimit::max(BODY_LIMIT)) // 2. whose size is bounded,
        .layer(from_fn_with_state(pool, authenticate)) // 1. of a known passenger.
        .with_state(service))
}

async fn authenticate(State(pool): State<PgPool>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = authorization.and_then(|value| value.strip_prefix("Bearer ")).ok_or_else(unknown)?;
    let user: Option<String> = sqlx::query_scalar("select name from passenger where token = $1::text and not revoked")
        .bind(token)
        .fetch_optional(&pool)
        .await?;
    request.extensions_mut().insert(User(user.ok_or_else(unknown)?));
    Ok(next.run(request).await)
}

/// The scope of a key is the authenticated passenger. It is never a name that the client merely sends: the client could
/// then read another passenger's responses.
fn scope(parts: &Parts) -> Result<String, Denied> {
    let User(name) = parts.extensions.get().ok_or_else(unknown)?;
    Ok(name.clone())
}

fn unknown() -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "unknown-token", "send your token, unless it was revoked")
}

/// Comes after the limit, because it reads the body, and before the key, because a forgery must not take one.
async fn check_signature(request: Request, next: Next) -> Result<Response, Problem> {
    if request.method() == Method::GET {
        return Ok(next.run(request).await);
    }
    let (parts, body) = request.into_parts();
    let unread = Request::from_parts(parts.clone(), body);
    let body = Bytes::from_request(unread, &()).await.map_err(|rejection| match rejection.status() {
        status @ StatusCode::PAYLOAD_TOO_LARGE => Problem::new(status, "too-large", "the body is over 16 KiB"),
        _ => Problem::new(StatusCode::BAD_REQUEST, "broken-body", "the body could not be read to its end"),
    })?;
    let signed = signed(&parts.method, parts.uri.path(), &body);
    if secret().verify(&signed, &parts.headers).is_err() {
        return Err(Problem::new(StatusCode::FORBIDDEN, "bad-signature", "this is not the request's signature"));
    }
    Ok(next.run(Request::from_parts(parts, Body::from(body))).await)
}

/// The bytes that the signature covers: a signed order is not a signed cancellation.
pub(crate) fn signed(method: &Method, path: &str, body: &[u8]) -> Vec<u8> {
    [method.as_str().as_bytes(), b" ", path.as_bytes(), b"\n", body].concat()
}
