//! The error responses of the services, as `application/problem+json` (RFC 9457).

use std::borrow::Cow;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pg_idempotency::http::Denied;
use pg_idempotency::{Error, InvalidKey};
use serde_json::json;

/// For errors that do not say when a retry can help.
const RETRY_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    kind: &'static str,
    detail: Cow<'static, str>,
    retry_after: Option<Duration>,
}

impl Problem {
    pub fn new(status: StatusCode, kind: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { status, kind, detail: detail.into(), retry_after: None }
    }

    pub fn with_retry_after(self, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..self }
    }

    fn response(&self) -> Response<Bytes> {
        let body = json!({
            "type": format!("https://demos.example/problems/{}", self.kind),
            "title": self.kind.replace('-', " "),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = self.status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(retry_after) = self.retry_after {
            // Whole seconds, rounded up: 0 would invite a retry at once.
            let seconds = retry_after.as_millis().div_ceil(1000).max(1) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        self.response().map(Body::from)
    }
}

impl From<Problem> for Denied {
    fn from(problem: Problem) -> Self {
        problem.response().into()
    }
}

impl From<InvalidKey> for Problem {
    fn from(error: InvalidKey) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed-key", error.to_string())
    }
}

/// The client learns what it can do. The log gets what happened.
impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::KeyReused { .. } => Self::new(StatusCode::UNPROCESSABLE_ENTITY, "key-reused", text),
            Error::InFlight { retry_after, .. } => {
                Self::new(StatusCode::CONFLICT, "in-flight", text).with_retry_after(retry_after)
            }
            // The client may ask again, because an operator settles the record.
            Error::Indeterminate { .. } | Error::StepInDoubt { .. } => {
                Self::new(StatusCode::CONFLICT, "indeterminate", text).with_retry_after(RETRY_AFTER)
            }
            // A deadlock, a broken connection, no free connection, a server that restarts.
            _ if error.is_transient() => {
                eprintln!("unavailable: {:#}", anyhow::Error::new(error));
                let detail = "out of order for now; ask again with the same key";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).with_retry_after(RETRY_AFTER)
            }
            _ => {
                eprintln!("internal error: {:#}", anyhow::Error::new(error));
                let detail = "something went wrong; ask again with the same key";
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal-error", detail)
            }
        }
    }
}

/// An error of a handler's own statements.
impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        Error::from(error).into()
    }
}
