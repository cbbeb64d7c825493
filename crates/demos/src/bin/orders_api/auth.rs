//! Who asks: the outermost layer says, and the scope of a key is what it has said.

use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use pg_idempotency::http::Denied;
use sqlx::PgPool;

use crate::problem::Problem;

/// A passenger whose token was good a moment ago.
#[derive(Clone)]
pub(crate) struct User(pub(crate) String);

pub(crate) async fn authenticate(
    State(pool): State<PgPool>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let token = bearer(request.headers()).ok_or_else(unknown)?;
    let user: Option<String> = sqlx::query_scalar("select name from passenger where token = $1::text and not revoked")
        .bind(token)
        .fetch_optional(&pool)
        .await?;
    request.extensions_mut().insert(User(user.ok_or_else(unknown)?));
    Ok(next.run(request).await)
}

/// Never from what the client merely says: with another's name in a header, one would be told another's answers.
pub(crate) fn scope(parts: &Parts) -> Result<String, Denied> {
    let User(name) = parts.extensions.get().ok_or_else(unknown)?;
    Ok(name.clone())
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

fn unknown() -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "unknown-token", "send the token that you got, if it was not revoked")
}
