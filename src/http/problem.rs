//! The response for a rejection: `application/problem+json` (RFC 9457), or another form that the service chooses.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

use super::rejection::Rejection;

/// The `type` of a problem is this prefix and [`Rejection::kind`].
pub const PROBLEM_TYPE: &str = "urn:pg-idempotency:problem:";

/// The default response for a rejection: a problem (RFC 9457) with `type`, `title`, `status`, `detail` and `retryable`,
/// and with `Retry-After` if the rejection [has a time](Rejection::retry_after).
#[must_use]
pub fn problem(rejection: &Rejection) -> Response<Bytes> {
    problem_with_status(rejection, rejection.status())
}

/// For APIs whose clients poll: *in flight* is `202 {"status":"processing"}`, and *key reused* is a 409. Every other
/// rejection is a [`problem`].
#[must_use]
pub fn processing(rejection: &Rejection) -> Response<Bytes> {
    match rejection {
        Rejection::InFlight { .. } => {
            let body = json!({ "status": "processing" }).to_string();
            respond(rejection, StatusCode::ACCEPTED, "application/json", body)
        }
        Rejection::KeyReused => problem_with_status(rejection, StatusCode::CONFLICT),
        _ => problem(rejection),
    }
}

fn problem_with_status(rejection: &Rejection, status: StatusCode) -> Response<Bytes> {
    let body = json!({
        "type": format!("{PROBLEM_TYPE}{}", rejection.kind()),
        "title": rejection.kind().replace('-', " "),
        "status": status.as_u16(),
        "detail": rejection.to_string(),
        "retryable": rejection.is_retryable(),
    });
    respond(rejection, status, "application/problem+json", body.to_string())
}

fn respond(rejection: &Rejection, status: StatusCode, content_type: &'static str, body: String) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if let Some(retry_after) = rejection.retry_after() {
        // The header counts whole seconds, and 0 would mean at once.
        let seconds = u64::try_from(retry_after.as_millis().div_ceil(1000)).unwrap_or(u64::MAX).max(1);
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
