//! `POST /rides` with an `Idempotency-Key`. It calls lease mode itself and not through the HTTP layer, because a resumer
//! has to finish the work without an HTTP request.

use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use pg_idempotency::{Error, Key, Outcome};
use serde_json::json;

use crate::outside::Failure;
use crate::ride::{Booking, NewRide, Rides};

/// When to ask again where the error does not say.
const RETRY_AFTER: Duration = Duration::from_secs(1);

pub(crate) fn router(rides: Rides) -> Router {
    Router::new().route("/rides", post(create)).with_state(rides)
}

async fn create(State(rides): State<Rides>, headers: HeaderMap, Json(new): Json<NewRide>) -> Response {
    // A real service takes the user from the authenticated session.
    let [user, value] =
        ["x-user-id", "idempotency-key"].map(|name| headers.get(name).and_then(|line| line.to_str().ok()));
    let (Some(user), Some(value)) = (user, value) else {
        return problem(StatusCode::BAD_REQUEST, "missing-header", "send an X-User-ID and an Idempotency-Key", None);
    };
    let key = match Key::new(user, &rides.operation, value) {
        Ok(key) => key,
        Err(error) => return problem(StatusCode::BAD_REQUEST, "malformed-key", &error.to_string(), None),
    };
    // In a task of its own: a client that hangs up must not put a text in doubt.
    match tokio::spawn(async move { rides.book(&key, &new).await }).await {
        Ok(Ok(outcome)) => answer(&outcome),
        Ok(Err(failure)) => refusal(&failure),
        Err(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal-error", "ask again with the same key", None),
    }
}

fn answer(outcome: &Outcome<Booking>) -> Response {
    let (Outcome::Performed(booking) | Outcome::Replayed(booking)) = outcome;
    let status = match booking {
        Booking::Booked { .. } => StatusCode::CREATED,
        Booking::Declined { .. } => StatusCode::PAYMENT_REQUIRED,
    };
    (status, [("idempotency-replayed", outcome.is_replayed().to_string())], Json(booking)).into_response()
}

fn refusal(failure: &Failure) -> Response {
    let text = failure.to_string();
    match failure {
        Failure::Idempotency(Error::KeyReused { .. }) => {
            problem(StatusCode::UNPROCESSABLE_ENTITY, "key-reused", &text, None)
        }
        Failure::Idempotency(Error::InFlight { retry_after, .. }) => {
            problem(StatusCode::CONFLICT, "in-flight", &text, Some(*retry_after))
        }
        // The client may ask again: an operator settles the ride.
        Failure::Idempotency(Error::Indeterminate { .. } | Error::StepInDoubt { .. }) => {
            problem(StatusCode::CONFLICT, "indeterminate", &text, Some(RETRY_AFTER))
        }
        Failure::Idempotency(Error::Exhausted { .. }) => problem(StatusCode::CONFLICT, "exhausted", &text, None),
        Failure::Idempotency(error) if error.is_transient() => {
            problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &text, Some(RETRY_AFTER))
        }
        Failure::NotDone(_) | Failure::Unknown(_) => {
            problem(StatusCode::BAD_GATEWAY, "gateway-failed", &text, Some(RETRY_AFTER))
        }
        Failure::Idempotency(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal-error", &text, None),
    }
}

fn problem(status: StatusCode, kind: &str, detail: &str, retry_after: Option<Duration>) -> Response {
    let body = json!({
        "type": format!("https://rides.example/problems/{kind}"),
        "title": kind.replace('-', " "),
        "status": status.as_u16(),
        "detail": detail,
    });
    let mut response = (status, Json(body)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if let Some(retry_after) = retry_after {
        // Whole seconds, and 0 would mean at once.
        let seconds = retry_after.as_millis().div_ceil(1000).max(1) as u64;
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
