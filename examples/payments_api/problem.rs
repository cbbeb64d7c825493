//! Every error, as `application/problem+json` (RFC 9457). What the client can do about it goes into `detail`; what
//! happened inside goes to the log alone.

use std::borrow::Cow;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pg_idempotency::{Error, InvalidKey};
use serde::Serialize;

/// Where the database says nothing, this does not hammer it.
const RETRY_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    kind: &'static str,
    detail: Cow<'static, str>,
    retry_after: Option<Duration>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, kind: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { status, kind, detail: detail.into(), retry_after: None }
    }

    pub(crate) fn internal(error: impl Into<anyhow::Error>) -> Self {
        eprintln!("payments_api: {:#}", error.into());
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal-error",
            "something went wrong; ask again with the same key",
        )
    }

    pub(crate) fn unavailable(error: impl Into<anyhow::Error>) -> Self {
        eprintln!("payments_api: {:#}", error.into());
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "out of order for now; ask again with the same key")
            .with_retry_after(RETRY_AFTER)
    }

    fn with_retry_after(self, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..self }
    }
}

#[derive(Serialize)]
struct Body<'p> {
    r#type: String,
    title: String,
    status: u16,
    detail: &'p str,
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = Body {
            r#type: format!("https://payments.example/problems/{}", self.kind),
            title: self.kind.replace('-', " "),
            status: self.status.as_u16(),
            detail: &self.detail,
        };
        let mut response = (self.status, Json(body)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(retry_after) = self.retry_after {
            // Whole seconds, and 0 would mean at once.
            let seconds = retry_after.as_millis().div_ceil(1000).max(1) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl From<InvalidKey> for Problem {
    fn from(error: InvalidKey) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed-key", error.to_string())
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        match error {
            Error::KeyReused { .. } => Self::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "key-reused",
                "this Idempotency-Key came with another body before; take a new key for a new payment",
            ),
            Error::InFlight { retry_after, .. } => Self::new(
                StatusCode::CONFLICT,
                "in-flight",
                "the first request with this Idempotency-Key is not finished; ask again with the same key",
            )
            .with_retry_after(retry_after),
            // Asking again gets the same until an operator has looked, and a new key might pay twice.
            Error::Indeterminate { .. } => {
                let logged = Self::internal(error);
                let detail = "nobody knows whether this payment was made; do not send it under a new key, ask us";
                Self { kind: "indeterminate", detail: detail.into(), ..logged }
            }
            Error::InvalidBody { .. } => {
                Self::new(StatusCode::BAD_REQUEST, "malformed-body", "the body cannot be compared with a later one")
            }
            // These pass: a deadlock, a newer release that is being rolled out, a migration that has not run yet.
            Error::Retryable(_)
            | Error::UnknownFingerprint { .. }
            | Error::UnknownMode { .. }
            | Error::SchemaMissing { .. } => Self::unavailable(error),
            Error::Database(ref source) if is_away(source) => Self::unavailable(error),
            // Mistakes in this program (a statement that is wrong, a `perform` that commits, a key shared with another
            // mode, a type that does not read what was stored), and what a later release of the crate may add.
            _ => Self::internal(error),
        }
    }
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        Error::from(error).into()
    }
}

/// Whether it is the database that is missing, and not a statement that is wrong: no connection, or SQLSTATE classes 08
/// (connection), 53 (out of resources) and 57 (shut down, starting, cancelled), or 25006 (a standby, not promoted yet).
fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) => {
            error.code().is_some_and(|code| ["08", "53", "57", "25006"].iter().any(|class| code.starts_with(class)))
        }
        _ => false,
    }
}
