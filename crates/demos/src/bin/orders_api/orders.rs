//! The handlers whose effects are in the database. None of them knows of retries: what it writes through the
//! [`IdempotentTx`] commits with its answer, and a repeat does not get here.

use axum::extract::{Path, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::{Extension, Json};
use pg_idempotency::http::IdempotentTx;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::auth::User;
use crate::order::{self, Order, State as OrderState};
use crate::problem::Problem;
use crate::server::Service;
use crate::version::{IfMatch, etag};

const STALE: Problem = Problem::new(
    StatusCode::PRECONDITION_FAILED,
    "stale-list",
    "your orders have changed, perhaps from another phone of yours; look at them, and ask again if you still mean it",
);
const UNKNOWN: Problem = Problem::new(StatusCode::NOT_FOUND, "unknown-order", "you have no such order");
const CANCELLED: Problem = Problem::new(StatusCode::GONE, "cancelled", "the order was cancelled");
const COMPLETED: Problem = Problem::new(StatusCode::CONFLICT, "completed", "the ride is over");

type JsonText = ([(HeaderName, String); 2], String);

/// Where a taxi is to go.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ride {
    destination: String,
}

pub(crate) async fn list(
    State(service): State<Service>,
    Extension(User(user)): Extension<User>,
) -> Result<JsonText, Problem> {
    let (version, orders) = order::list(&service.pool, &user).await?;
    Ok(([(header::ETAG, etag(version)), (header::CONTENT_TYPE, "application/json".to_owned())], orders))
}

pub(crate) async fn create(
    Extension(User(user)): Extension<User>,
    if_match: IfMatch,
    mut tx: IdempotentTx,
    Json(ride): Json<Ride>,
) -> Result<(StatusCode, [(HeaderName, String); 1], Json<Order>), Problem> {
    // Locked until the commit: of two phones at once, the second finds the first one's version. A 412 frees the key.
    // And the retry of an order that was made does not come here, where its own view would be stale by now.
    if !if_match.holds(order::lock_list(&mut tx, &user).await?) {
        return Err(STALE);
    }
    let order = order::insert(&mut tx, &user, &ride.destination).await?;
    order::list_changed(&mut tx, &user).await?;
    Ok((StatusCode::CREATED, [(header::LOCATION, format!("/orders/{}", order.id))], Json(order)))
}

pub(crate) async fn redirect(
    Extension(User(user)): Extension<User>,
    Path(id): Path<Uuid>,
    mut tx: IdempotentTx,
    Json(ride): Json<Ride>,
) -> Result<Json<Order>, Problem> {
    open(&mut tx, &user, id).await?;
    let order = order::redirect(&mut tx, id, &ride.destination).await?;
    order::list_changed(&mut tx, &user).await?;
    Ok(Json(order))
}

pub(crate) async fn cancel(
    Extension(User(user)): Extension<User>,
    Path(id): Path<Uuid>,
    mut tx: IdempotentTx,
) -> Result<Json<Order>, Problem> {
    open(&mut tx, &user, id).await?;
    let order = order::settle(&mut tx, id, OrderState::Cancelled).await?;
    order::list_changed(&mut tx, &user).await?;
    Ok(Json(order))
}

pub(crate) async fn complete(
    Extension(User(user)): Extension<User>,
    Path(id): Path<Uuid>,
    mut tx: IdempotentTx,
) -> Result<Json<Value>, Problem> {
    open(&mut tx, &user, id).await?;
    order::settle(&mut tx, id, OrderState::Completed).await?;
    order::list_changed(&mut tx, &user).await?;
    let rides = order::count_ride(&mut tx, &user).await?;
    Ok(Json(json!({ "id": id, "completed_rides": rides })))
}

/// Locks an order that can still be changed.
async fn open(tx: &mut IdempotentTx, user: &str, id: Uuid) -> Result<(), Problem> {
    match order::lock(tx, user, id).await? {
        None => Err(UNKNOWN),
        Some(OrderState::Ordered) => Ok(()),
        Some(OrderState::Cancelled) => Err(CANCELLED),
        Some(OrderState::Completed) => Err(COMPLETED),
    }
}
