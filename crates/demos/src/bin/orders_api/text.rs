//! The handler whose effect is outside: a text to the passenger, at most once. It has no transaction; the layer holds
//! the key under a lease while it runs.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use pg_idempotency::lease::Lease;
use serde_json::json;
use uuid::Uuid;

use crate::auth::User;
use crate::gateway::Busy;
use crate::order;
use crate::problem::Problem;
use crate::server::Service;

const UNKNOWN: Problem = Problem::new(StatusCode::NOT_FOUND, "unknown-order", "you have no such order");
const BUSY: Problem = Problem::new(
    StatusCode::SERVICE_UNAVAILABLE,
    "gateway-busy",
    "the gateway takes no texts for now; ask again with the same key",
);

pub(crate) async fn send(
    State(service): State<Service>,
    Extension(User(user)): Extension<User>,
    lease: Lease,
    id: Result<Path<Uuid>, PathRejection>,
) -> Response {
    // The extractor's own refusal would not say that nothing was sent.
    let Ok(Path(id)) = id else { return nothing_sent(&lease, UNKNOWN) };
    let (phone, destination) = match order::to_text(&service.pool, &user, id).await {
        Ok(Some(order)) => order,
        Ok(None) => return nothing_sent(&lease, UNKNOWN),
        Err(error) => return nothing_sent(&lease, error.into()),
    };
    let text = format!("Your taxi to {destination} is on its way.");
    match service.gateway.send(id, &phone, &text).await {
        Ok(number) => Json(json!({ "text": number })).into_response(),
        Err(Busy) => nothing_sent(&lease, BUSY),
    }
}

/// Any other failure leaves open whether there was a text, and the key with it. This one frees the key.
fn nothing_sent(lease: &Lease, problem: Problem) -> Response {
    lease.not_performed(problem).into_response()
}
