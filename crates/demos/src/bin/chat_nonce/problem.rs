//! Every error, for both transports: an object after RFC 9457. What the client can do about it goes into `detail`; what
//! happened inside goes to the log alone.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pg_idempotency::{Error, InvalidKey};
use serde_json::{Value, json};

/// Where the database says nothing, this does not hammer it.
const RETRY_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    kind: &'static str,
    detail: String,
    retry_after: Option<Duration>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, kind: &'static str, detail: impl Into<String>) -> Self {
        Self { status, kind, detail: detail.into(), retry_after: None }
    }

    fn with_retry_after(self, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..self }
    }

    pub(crate) fn body(&self) -> Value {
        json!({
            "type": format!("https://chat.example/problems/{}", self.kind),
            "title": self.kind.replace('-', " "),
            "status": self.status.as_u16(),
            "detail": self.detail,
        })
    }

    /// Whole seconds, and 0 would mean at once.
    pub(crate) fn retry_after(&self) -> Option<u64> {
        Some(self.retry_after?.as_millis().div_ceil(1000).max(1) as u64)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after() {
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
            Error::InFlight { retry_after, .. } => Self::new(
                StatusCode::CONFLICT,
                "in-flight",
                "the first request with this nonce is not finished; ask again with the same nonce",
            )
            .with_retry_after(retry_after),
            // A deadlock, a connection that broke or was not to be had, a server that restarts.
            _ if error.is_transient() => {
                eprintln!("chat_nonce: {:#}", anyhow::Error::new(error));
                Self::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "unavailable",
                    "out of order for now; ask again with the same nonce",
                )
                .with_retry_after(RETRY_AFTER)
            }
            // Mistakes in this program. No `KeyReused` among them: every fingerprint is of the same nothing.
            _ => {
                eprintln!("chat_nonce: {:#}", anyhow::Error::new(error));
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal-error", "something went wrong")
            }
        }
    }
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        Error::from(error).into()
    }
}
