//! script/with-postgres cargo run --features axum --example http_layer
//!
//! An axum service whose `POST /payments` takes an `Idempotency-Key`: the tower layer, in transactional mode.
//!
//! ```text
//! 1250 cents: 201 Created, replayed: false, {"id":1,"cents":1250}
//! 1250 cents: 201 Created, replayed: true, {"id":1,"cents":1250}
//! 9900 cents: 422 Unprocessable Entity, replayed: false, {"detail":"this Idempotency-Key was sent with a different request before; send that request again, or use a new key for another operation","retryable":false,"status":422,"title":"key reused","type":"urn:pg-idempotency:problem:key-reused"}
//! ```

use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::post;
use axum::{Json, Router};
use pg_idempotency::Idempotency;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

/// The authenticated caller.
#[derive(Clone)]
struct Account(String);

#[derive(Deserialize)]
struct NewPayment {
    cents: i64,
}

#[derive(Serialize)]
struct Payment {
    id: i64,
    cents: i64,
}

/// The payment commits together with the key and this response. An error status undoes all of it and frees the key.
async fn pay(mut tx: IdempotentTx, Json(new): Json<NewPayment>) -> Result<(StatusCode, Json<Payment>), StatusCode> {
    let id = sqlx::query_scalar("insert into payment (cents) values ($1) returning id")
        .bind(new.cents)
        .fetch_one(&mut *tx)
        .await
        .map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok((StatusCode::CREATED, Json(Payment { id, cents: new.cents })))
}

/// A stand-in for your authentication: a token that is its account's name.
async fn authenticate(headers: HeaderMap, mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let token = headers.get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let account = Account(token.ok_or(StatusCode::UNAUTHORIZED)?.to_owned());
    request.extensions_mut().insert(account);
    Ok(next.run(request).await)
}

fn router(pool: PgPool) -> Router {
    // The scope is the authenticated account, so accounts cannot share a key.
    let idempotency = IdempotencyLayer::transactional(pool, Idempotency::new(), |request| {
        let Account(id) = request.extensions.get().ok_or(StatusCode::UNAUTHORIZED)?;
        Ok(id.clone())
    });
    Router::new()
        .route("/payments", post(pay))
        .route_layer(idempotency)
        // Added later, so it runs earlier.
        .route_layer(middleware::from_fn(authenticate))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Without a database, sqlx would wait for 30 seconds, and no client waits so long for its 503.
    let pool =
        PgPoolOptions::new().acquire_timeout(Duration::from_secs(3)).connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql("create table if not exists payment (id bigint generated always as identity, cents bigint not null)")
        .execute(&pool)
        .await?;

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/payments", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, router(pool)).await });

    let client = reqwest::Client::builder().no_proxy().build()?;
    for cents in [1250, 1250, 9900] {
        let request = client.post(&url).bearer_auth("ada").json(&serde_json::json!({ "cents": cents }));
        let response = request.header("Idempotency-Key", "\"8e03978e-40d5-43dd-bc93-6894a57f9324\"").send().await?;
        let replayed = response.headers().contains_key("idempotent-replayed");
        println!("{cents} cents: {}, replayed: {replayed}, {}", response.status(), response.text().await?);
    }
    Ok(())
}
