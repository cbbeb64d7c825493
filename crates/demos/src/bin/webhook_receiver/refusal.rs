//! Every answer but 200. A sender delivers again whatever is not 2xx; the status says whether that will help.

use std::time::Duration;

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use pg_idempotency::Error;
use serde_json::json;

use crate::signature::Unsigned;

/// Where the database says nothing, this does not hammer it.
const RETRY_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) enum Refusal {
    Unsigned(Unsigned),
    /// Signed, and not to be understood.
    Malformed(String),
    /// Another delivery of this event is being processed, and may still fail: there is nothing to acknowledge yet.
    InFlight(Duration),
    Unavailable(anyhow::Error),
    /// The processing failed on purpose.
    Failed,
    Internal(anyhow::Error),
}

impl Refusal {
    pub(crate) fn malformed(error: impl std::error::Error) -> Self {
        Self::Malformed(error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, error, retry_after) = match self {
            Self::Unsigned(Unsigned::Forged) => (StatusCode::UNAUTHORIZED, "forged".to_owned(), None),
            Self::Unsigned(Unsigned::Stale) => (StatusCode::UNAUTHORIZED, "stale".to_owned(), None),
            Self::Malformed(error) => (StatusCode::BAD_REQUEST, error, None),
            // Not a 409: some senders take every 4xx for a final no.
            Self::InFlight(after) => (StatusCode::SERVICE_UNAVAILABLE, "in flight".to_owned(), Some(after)),
            Self::Unavailable(error) => {
                eprintln!("webhook_receiver: {error:#}");
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable".to_owned(), Some(RETRY_AFTER))
            }
            Self::Failed => (StatusCode::INTERNAL_SERVER_ERROR, "failed".to_owned(), None),
            Self::Internal(error) => {
                eprintln!("webhook_receiver: {error:#}");
                (StatusCode::INTERNAL_SERVER_ERROR, "internal error".to_owned(), None)
            }
        };
        let mut response = (status, Json(json!({ "error": error }))).into_response();
        if let Some(after) = retry_after {
            // Whole seconds, and 0 would mean at once.
            let seconds = after.as_millis().div_ceil(1000).max(1) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

impl From<Unsigned> for Refusal {
    fn from(unsigned: Unsigned) -> Self {
        Self::Unsigned(unsigned)
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        match error {
            Error::InFlight { retry_after, .. } => Self::InFlight(retry_after),
            // A deadlock, a connection that broke or was not to be had, a server that restarts.
            _ if error.is_transient() => Self::Unavailable(error.into()),
            _ => Self::Internal(error.into()),
        }
    }
}

impl From<sqlx::Error> for Refusal {
    fn from(error: sqlx::Error) -> Self {
        Error::from(error).into()
    }
}
