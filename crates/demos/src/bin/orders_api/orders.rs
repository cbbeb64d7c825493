//! The handlers whose effects are in the database. None of them knows of retries: their writes through the
//! [`IdempotentTx`] commit with the response, and a repeat does not reach the handler.

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use demos::outside::Outside;
use demos::problem::Problem;
use pg_idempotency::http::IdempotentTx;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::PgPool;
use uuid::Uuid;

pub(crate) const TABLES: &str = "
    create table passenger (
        name text primary key,
        token text not null unique,
        revoked boolean not null default false,
        phone text not null,
        -- Counts the changes to the passenger's list of orders: its ETag.
        list_version bigint not null default 0,
        completed_rides bigint not null default 0
    );
    create table taxi_order (
        number bigint generated always as identity,
        id uuid primary key,
        passenger text not null references passenger,
        destination text not null,
        state text not null default 'ordered' check (state in ('ordered', 'cancelled', 'completed'))
    );
";

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) pool: PgPool,
    pub(crate) outside: Outside,
}

/// A passenger whose token was valid a moment ago.
#[derive(Clone)]
pub(crate) struct User(pub(crate) String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ride {
    destination: String,
}

#[derive(Serialize, sqlx::FromRow)]
pub(crate) struct Order {
    id: Uuid,
    destination: String,
    state: String,
}

/// The list and its version are of one snapshot.
pub(crate) async fn list(
    State(service): State<Service>,
    Extension(User(user)): Extension<User>,
) -> Result<Response, Problem> {
    let sql = "
        select
            list_version,
            (
                select coalesce(json_agg(json_build_object('id', id, 'destination', destination, 'state', state)
                    order by number), '[]')::text
                from taxi_order
                where passenger = name
            )
        from passenger
        where name = $1::text
    ";
    let (version, orders): (i64, String) = sqlx::query_as(sql).bind(user).fetch_one(&service.pool).await?;
    let json = "application/json".to_owned();
    Ok(([(header::ETAG, etag(version)), (header::CONTENT_TYPE, json)], orders).into_response())
}

fn etag(version: i64) -> String {
    format!("\"{version}\"")
}

pub(crate) async fn create(
    Extension(User(user)): Extension<User>,
    headers: HeaderMap,
    mut tx: IdempotentTx,
    Json(ride): Json<Ride>,
) -> Result<(StatusCode, Json<Order>), Problem> {
    // Locked until the commit: of two phones at once, the second sees the first one's version. A retry of an order that
    // was made does not get here, where its own view of the list would be stale by now. A 412 frees the key.
    let sql = "select list_version from passenger where name = $1::text for update";
    let version: i64 = sqlx::query_scalar(sql).bind(&user).fetch_one(&mut *tx).await?;
    if headers.get(header::IF_MATCH).is_some_and(|seen| seen.as_bytes() != etag(version).as_bytes()) {
        let detail = "your orders have changed; look at them, and ask again if you still want this one";
        return Err(Problem::new(StatusCode::PRECONDITION_FAILED, "stale-list", detail));
    }
    let sql = "
        insert into taxi_order (id, passenger, destination)
        values ($1::uuid, $2::text, $3::text)
        returning id, destination, state
    ";
    let order = sqlx::query_as(sql).bind(Uuid::new_v4()).bind(&user).bind(ride.destination).fetch_one(&mut *tx).await?;
    list_changed(&mut tx, &user).await?;
    Ok((StatusCode::CREATED, Json(order)))
}

pub(crate) async fn redirect(
    Extension(User(user)): Extension<User>,
    Path(id): Path<Uuid>,
    mut tx: IdempotentTx,
    Json(ride): Json<Ride>,
) -> Result<Json<Order>, Problem> {
    must_be_open(&mut tx, &user, id).await?;
    let sql = "update taxi_order set destination = $2::text where id = $1::uuid returning id, destination, state";
    let order = sqlx::query_as(sql).bind(id).bind(ride.destination).fetch_one(&mut *tx).await?;
    list_changed(&mut tx, &user).await?;
    Ok(Json(order))
}

pub(crate) async fn cancel(
    Extension(User(user)): Extension<User>,
    Path(id): Path<Uuid>,
    mut tx: IdempotentTx,
) -> Result<Json<Order>, Problem> {
    must_be_open(&mut tx, &user, id).await?;
    Ok(Json(settle(&mut tx, &user, id, "cancelled").await?))
}

/// Nothing in the counter tells one ride from the next: only the key keeps a repeat from counting.
pub(crate) async fn complete(
    Extension(User(user)): Extension<User>,
    Path(id): Path<Uuid>,
    mut tx: IdempotentTx,
) -> Result<Json<Value>, Problem> {
    must_be_open(&mut tx, &user, id).await?;
    settle(&mut tx, &user, id, "completed").await?;
    let sql = "
        update passenger
        set completed_rides = completed_rides + 1
        where name = $1::text
        returning completed_rides
    ";
    let rides: i64 = sqlx::query_scalar(sql).bind(&user).fetch_one(&mut *tx).await?;
    Ok(Json(json!({ "id": id, "completed_rides": rides })))
}

/// Locks an order that can still be changed.
async fn must_be_open(tx: &mut IdempotentTx, user: &str, id: Uuid) -> Result<(), Problem> {
    let sql = "select state from taxi_order where passenger = $1::text and id = $2::uuid for update";
    let state: Option<String> = sqlx::query_scalar(sql).bind(user).bind(id).fetch_optional(&mut **tx).await?;
    match state.as_deref() {
        Some("ordered") => Ok(()),
        Some("cancelled") => Err(Problem::new(StatusCode::GONE, "cancelled", "the order was cancelled")),
        Some(_) => Err(Problem::new(StatusCode::CONFLICT, "completed", "the ride is over")),
        None => Err(Problem::new(StatusCode::NOT_FOUND, "unknown-order", "you have no such order")),
    }
}

/// The order's row stays, so a later request learns its state.
async fn settle(tx: &mut IdempotentTx, user: &str, id: Uuid, state: &str) -> sqlx::Result<Order> {
    let sql = "update taxi_order set state = $2::text where id = $1::uuid returning id, destination, state";
    let order = sqlx::query_as(sql).bind(id).bind(state).fetch_one(&mut **tx).await?;
    list_changed(tx, user).await?;
    Ok(order)
}

async fn list_changed(tx: &mut IdempotentTx, user: &str) -> sqlx::Result<()> {
    let sql = "update passenger set list_version = list_version + 1 where name = $1::text";
    sqlx::query(sql).bind(user).execute(&mut **tx).await.map(drop)
}
