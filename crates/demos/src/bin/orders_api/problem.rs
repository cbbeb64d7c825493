//! The service's own errors, as `application/problem+json` (RFC 9457). Those of the layer are problems by themselves.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pg_idempotency::http::Denied;
use serde_json::json;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    kind: &'static str,
    detail: &'static str,
}

impl Problem {
    pub(crate) const fn new(status: StatusCode, kind: &'static str, detail: &'static str) -> Self {
        Self { status, kind, detail }
    }

    fn response(&self) -> Response<Bytes> {
        let body = json!({
            "type": format!("https://orders.example/problems/{}", self.kind),
            "title": self.kind.replace('-', " "),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = self.status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
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

/// Whatever it was: the transaction is rolled back and the key free, so that asking again is right.
impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        eprintln!("orders_api: {:#}", anyhow::Error::new(error));
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "out of order for now; ask again with the same key")
    }
}
