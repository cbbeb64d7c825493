//! The payments API. All of its idempotency is in one layer, [`idempotency`]. The handler that pays does not know of
//! retries.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Json, Router};
use demos::problem::Problem;
use demos::schema::Schema;
use demos::service::user;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use pg_idempotency::{Idempotency, Key, OnDuplicate};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;
use uuid::Uuid;

pub(crate) const TABLES: &str = "
    -- The count at the end uses the key. It is not unique: only the layer prevents a second payment.
    create table payment (
        id uuid primary key,
        user_id text not null,
        idempotency_key text not null,
        amount bigint not null check (amount > 0),
        currency text not null,
        customer_id text not null
    );
";

/// PostgreSQL accepts 100 connections by default, and a deployment runs several of these processes.
const CONNECTIONS: u32 = 16;

/// A payment takes milliseconds, and the client prefers the payment to a request to ask again.
const WAIT: Duration = Duration::from_secs(5);

/// Below the 30 seconds after which Kubernetes kills.
const DRAIN_LIMIT: Duration = Duration::from_secs(25);

/// Everything that the service says about idempotency.
fn idempotency(pool: PgPool) -> IdempotencyLayer {
    let calls = Idempotency::new().on_duplicate(OnDuplicate::Wait(WAIT));
    IdempotencyLayer::transactional(pool, calls, |parts| Ok(user(&parts.headers)?))
        // White space and the order of members do not make another request.
        .canonical_json([])
}

pub(crate) async fn router(schema: &Schema) -> anyhow::Result<Router> {
    Ok(routes(idempotency(schema.pool(CONNECTIONS).await?)))
}

fn routes(layer: IdempotencyLayer) -> Router {
    Router::new().route("/payments", post(create)).route_layer(layer)
}

/// Serves requests until SIGTERM, and then finishes the payments that have begun.
pub(crate) async fn serve(schema: &Schema, _: &[String]) -> anyhow::Result<()> {
    let pool = schema.pool(CONNECTIONS).await?;
    let layer = idempotency(pool);
    let runs = layer.runs();
    let router = routes(layer);
    // Registered before the URL is printed, because a reader of that line may send SIGTERM at once.
    let mut terminated = signal(SignalKind::terminate())?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    let stopping = async move {
        terminated.recv().await;
    };
    axum::serve(listener, router).with_graceful_shutdown(stopping).await?;
    // The run of a client that hung up goes on without a connection.
    Ok(timeout(DRAIN_LIMIT, runs.finished()).await?)
}

/// An unknown member is refused: a client should learn of `"ammount"` before it has paid.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewPayment {
    amount: i64,
    currency: String,
    customer_id: String,
}

#[derive(Serialize)]
struct Payment {
    id: Uuid,
    amount: i64,
    currency: String,
    customer_id: String,
}

/// The payment commits together with its key and this response, or not at all.
async fn create(
    Extension(key): Extension<Key>,
    mut tx: IdempotentTx,
    body: Bytes,
) -> Result<(StatusCode, Json<Payment>), Problem> {
    let malformed =
        |error: serde_json::Error| Problem::new(StatusCode::BAD_REQUEST, "malformed-body", error.to_string());
    let NewPayment { amount, currency, customer_id } = serde_json::from_slice(&body).map_err(malformed)?;
    if amount <= 0 {
        let detail = "the amount must be positive";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid-payment", detail));
    }
    let payment = Payment { id: Uuid::new_v4(), amount, currency, customer_id };
    sqlx::query(
        "
        insert into payment (id, user_id, idempotency_key, amount, currency, customer_id)
        values ($1::uuid, $2::text, $3::text, $4::int8, $5::text, $6::text)
        ",
    )
    .bind(payment.id)
    .bind(key.scope())
    .bind(key.value())
    .bind(payment.amount)
    .bind(&payment.currency)
    .bind(&payment.customer_id)
    .execute(&mut *tx)
    .await?;
    Ok((StatusCode::CREATED, Json(payment)))
}
