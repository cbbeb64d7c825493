//! The routes, and the one table: here a request becomes a payment, once.

use std::time::Duration;

use anyhow::anyhow;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use pg_idempotency::{Idempotency, Key};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use sqlx::{PgConnection, PgPool};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::problem::Problem;
use crate::request::{KeyValue, NewPayment, User};

/// Remembers a key for 24 hours; a concurrent duplicate waits up to 5 seconds for the first request's answer.
const IDEMPOTENCY: Idempotency = Idempotency::new();

const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// A payment is a few hundred bytes; what is over a mebibyte is a mistake or an attack.
const BODY_LIMIT: usize = 1024 * 1024;

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) pool: PgPool,
    pub(crate) probe: PgPool,
    /// How long the stand-in for real work takes, so that demo and tests can hit the middle of it.
    pub(crate) delay: Duration,
    /// Every run holds one of these, upgraded, and so `main` sees the end of the last one.
    pub(crate) running: mpsc::WeakSender<()>,
}

pub(crate) fn router(service: Service) -> Router {
    Router::new()
        .route("/payments", get(list).post(create))
        .route("/healthz", get(health))
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "unknown-route", "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, "wrong-method", "this path does not take this method")
        })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
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

async fn create(
    State(service): State<Service>,
    User(user): User,
    KeyValue(value): KeyValue,
    new: NewPayment,
) -> Result<Response, Problem> {
    let Service { pool, delay, running, .. } = service;
    let key = Key::new(user, "POST /payments", value)?;
    let running = running.upgrade().ok_or_else(|| Problem::unavailable(anyhow!("shutting down")))?;

    // A client that hangs up drops this handler. In a task of its own the run goes on to its commit, so that the retry
    // finds the answer instead of starting over.
    let run = tokio::spawn(async move {
        let outcome = IDEMPOTENCY
            .run(&pool, &key, &new, async |conn| -> Result<Box<RawValue>, Problem> {
                let payment = insert(conn, &key, &new).await?;
                if !delay.is_zero() {
                    sqlx::query("select pg_sleep($1::float8)").bind(delay.as_secs_f64()).execute(conn).await?;
                }
                to_raw_value(&payment).map_err(Problem::internal)
            })
            .await;
        drop(running);
        outcome
    });
    let outcome = run.await.map_err(Problem::internal)??;

    let mut headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    if outcome.is_replayed() {
        headers.insert(REPLAYED, HeaderValue::from_static("true"));
    }
    // The stored text itself, not a `Payment` encoded anew: a release that adds a field must not change old answers.
    let body: Box<str> = outcome.into_inner().into();
    Ok((StatusCode::CREATED, headers, Bytes::from(body.into_boxed_bytes())).into_response())
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
    sqlx::query("select 1").execute(&service.probe).await.map_err(Problem::unavailable)?;
    Ok("ok\n")
}

/// One text, which PostgreSQL runs as one transaction: the advisory lock lets processes that start together take turns,
/// because `if not exists` alone fails for the later of two. No `create index`: that waits for payments in flight even
/// where the index is there, and holds up new ones.
///
/// The key is there for people and for the demo's count. It must not be unique: a day later it may be used again.
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
