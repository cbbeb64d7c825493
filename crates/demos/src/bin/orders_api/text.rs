//! The handler whose effect is outside the database: a text to the passenger, at most once. It has no transaction. The
//! layer holds the key under a lease while it runs.

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use demos::outside::Failure;
use demos::problem::Problem;
use pg_idempotency::http::LeasedBody;
use pg_idempotency::lease::Lease;
use uuid::Uuid;

use crate::orders::{Service, User};

pub(crate) async fn send(
    State(service): State<Service>,
    Extension(User(user)): Extension<User>,
    LeasedBody(lease, (Path(id), _)): LeasedBody<(Path<Uuid>, Bytes)>,
) -> Response {
    let sql = "
        select phone
        from taxi_order
        join passenger on name = passenger
        where passenger = $1::text and id = $2::uuid
    ";
    let phone: String = match sqlx::query_scalar(sql).bind(user).bind(id).fetch_optional(&service.pool).await {
        Ok(Some(phone)) => phone,
        Ok(None) => {
            return nothing_sent(
                &lease,
                Problem::new(StatusCode::NOT_FOUND, "unknown-order", "you have no such order"),
            );
        }
        Err(error) => return nothing_sent(&lease, error.into()),
    };
    let reference = Uuid::new_v4().to_string();
    match service.outside.text(reference, &phone).await {
        Ok(receipt) => Json(receipt).into_response(),
        Err(failure @ Failure::NotDone(_)) => {
            nothing_sent(&lease, Problem::new(StatusCode::SERVICE_UNAVAILABLE, "gateway-busy", failure.to_string()))
        }
        Err(failure) => Problem::new(StatusCode::BAD_GATEWAY, "gateway-failed", failure.to_string()).into_response(),
    }
}

/// This failure frees the key. Any other failure leaves open whether a text was sent, and so keeps the key.
fn nothing_sent(lease: &Lease, problem: Problem) -> Response {
    lease.not_performed(problem).into_response()
}
