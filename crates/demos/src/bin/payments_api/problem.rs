//! Every error, the layer's too, as `application/problem+json` (RFC 9457) with the types of this API.

use std::borrow::Cow;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pg_idempotency::Error;
use pg_idempotency::http::{Denied, Rejection};
use serde_json::json;

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

    pub(crate) fn response(&self) -> Response<Bytes> {
        let body = json!({
            "type": format!("https://payments.example/problems/{}", self.kind),
            "title": self.kind.replace('-', " "),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = self.status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(retry_after) = self.retry_after {
            // Whole seconds, and 0 would mean at once.
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

impl From<&Rejection> for Problem {
    fn from(rejection: &Rejection) -> Self {
        // What happened inside goes to the log alone; what the client can do about it is the rejection's text.
        if rejection.status().is_server_error() {
            eprintln!("payments_api: {:#}", anyhow::Error::new(rejection.clone()));
        }
        let kind = match rejection.kind() {
            "missing-key" => "malformed-key",
            "body-too-large" => "too-large",
            "broken-body" | "invalid-body" => "malformed-body",
            "misconfigured" => "internal-error",
            kind => kind,
        };
        Self { retry_after: rejection.retry_after(), ..Self::new(rejection.status(), kind, rejection.to_string()) }
    }
}

/// What went wrong in the handler's own statements: the database is away, or a statement is wrong.
impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        let error = Error::from(error);
        let away = error.is_transient();
        eprintln!("payments_api: {:#}", anyhow::Error::new(error));
        if !away {
            let detail = "something went wrong; ask again with the same key";
            return Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal-error", detail);
        }
        let detail = "out of order for now; ask again with the same key";
        let unavailable = Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail);
        Self { retry_after: Some(RETRY_AFTER), ..unavailable }
    }
}
