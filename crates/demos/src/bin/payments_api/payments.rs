//! The layer, the routes, and the one table. The handler that pays knows nothing of retries.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Extension, Json, Router};
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, InvalidSetting};
use pg_idempotency::{Idempotency, InFlight, Key};
use serde::Serialize;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use crate::problem::Problem;
use crate::request::{NewPayment, User};

/// Shorter ones are counters and dates, which two devices of one user make up alike.
const SHORTEST_KEY: usize = 8;

/// A payment takes milliseconds, and the client wants the payment, not a reason to ask again.
const WAIT: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) pool: PgPool,
    /// How long the stand-in for real work takes, so that demo and tests can hit the middle of it.
    pub(crate) delay: Duration,
}

/// All that the service has to say about idempotency.
pub(crate) fn idempotency(pool: PgPool) -> Result<IdempotencyLayer, InvalidSetting> {
    let scope = |parts: &_| {
        let User(user) = User::of(parts)?;
        Ok(user)
    };
    let options = Idempotency::new().with_in_flight(InFlight::Wait(WAIT))?;
    Ok(IdempotencyLayer::transactional(pool, options, scope)
        .with_shortest_key(SHORTEST_KEY)
        // What has the same values is the same request, whatever its white space and order.
        .with_canonical_json([])?
        .with_rejection(|rejection| Problem::from(rejection).response()))
}

pub(crate) fn router(service: Service, idempotency: IdempotencyLayer) -> Router {
    Router::new()
        .route("/payments", get(list).post(create))
        // In front of what stands above it, and not of the fallbacks: what is nowhere is not an operation.
        .route_layer(idempotency)
        .route("/healthz", get(health))
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "unknown-route", "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, "wrong-method", "this path does not take this method")
        })
        .with_state(service)
}

/// What the client gets, and the columns of its row.
#[derive(Serialize, sqlx::FromRow)]
struct Payment {
    id: Uuid,
    amount: i64,
    currency: String,
    customer_id: String,
    status: String,
}

/// Commits with the key and with what it returns, or not at all.
async fn create(
    State(Service { delay, .. }): State<Service>,
    Extension(key): Extension<Key>,
    mut tx: IdempotentTx,
    new: NewPayment,
) -> Result<(StatusCode, Json<Payment>), Problem> {
    let payment = insert(&mut tx, &key, &new).await?;
    if !delay.is_zero() {
        sqlx::query("select pg_sleep($1::float8)").bind(delay.as_secs_f64()).execute(&mut *tx).await?;
    }
    Ok((StatusCode::CREATED, Json(payment)))
}

async fn insert(conn: &mut PgConnection, key: &Key, new: &NewPayment) -> sqlx::Result<Payment> {
    sqlx::query_as(
        "
        insert into payments (id, user_id, idempotency_key, amount, currency, customer_id, status)
        values ($1::uuid, $2::text, $3::text, $4::int8, $5::text, $6::text, 'confirmed')
        returning id, amount, currency, customer_id, status
        ",
    )
    .bind(Uuid::new_v4())
    .bind(key.scope())
    .bind(key.value())
    .bind(new.amount)
    .bind(&new.currency)
    .bind(&new.customer_id)
    .fetch_one(conn)
    .await
}

#[derive(Serialize)]
struct Payments {
    payments: Vec<Payment>,
}

async fn list(State(service): State<Service>, User(user): User) -> Result<Json<Payments>, Problem> {
    let payments = sqlx::query_as(
        "
        select id, amount, currency, customer_id, status
        from payments
        where user_id = $1::text
        order by number
        ",
    )
    .bind(user)
    .fetch_all(&service.pool)
    .await?;
    Ok(Json(Payments { payments }))
}

async fn health(State(service): State<Service>) -> Result<&'static str, Problem> {
    sqlx::query("select 1").execute(&service.pool).await?;
    Ok("ok\n")
}

/// PostgreSQL runs one text as one transaction, so the advisory lock makes processes that start together take turns:
/// `if not exists` alone fails for the later of two. There is no `create index`, because it waits for payments in
/// flight even where the index exists, and holds up new ones.
///
/// People and the demo's count use the key. It must not be unique: a day later a client may use it again.
pub(crate) async fn create_table(pool: &PgPool) -> sqlx::Result<()> {
    sqlx::raw_sql(
        "
        select pg_advisory_xact_lock(hashtextextended('payments_api', 0));
        create table if not exists payments (
            number bigint generated always as identity,
            id uuid primary key,
            user_id text not null,
            idempotency_key text not null,
            amount bigint not null check (amount > 0),
            currency text not null,
            customer_id text not null,
            status text not null,
            created_at timestamptz not null default now(),
            constraint payments_of_user unique (user_id, number)
        );
        ",
    )
    .execute(pool)
    .await
    .map(drop)
}
