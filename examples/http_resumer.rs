//! script/with-postgres cargo run --features axum --example http_resumer
//!
//! An axum service whose `POST /payments` calls a gateway. The first attempt fails after the charge, its client does
//! not come back, and a resumer finishes the request.
//!
//! ```text
//! the gateway charges 1250 cents of ada under a key of 32 digits
//! the client hears 503 Service Unavailable, and does not come back
//! the gateway knows the key
//! a late retry: 201 Created, replayed: true, ch_1
//! ```

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::ensure;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Json, Router};
use pg_idempotency::Key;
use pg_idempotency::http::{Decision, IdempotencyLayer, LeasedBody, RequestResumer, method_not_allowed};
use pg_idempotency::lease::{LeaseOptions, Policy};
use sqlx::postgres::PgPoolOptions;
use tokio::sync::Notify;
use tower::ServiceExt as _;

const POLICY: Policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
/// A week for a person who settles a payment. After the retention, a retry charges again.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// A payment that fails each time is left to an operator after ten attempts.
const ATTEMPTS: NonZeroU32 = NonZeroU32::new(10).expect("ten");
/// Here the client never comes back. The default of a minute gives it time for a retry.
const RESUME_AFTER: Duration = Duration::from_millis(100);

/// The authenticated caller.
#[derive(Clone)]
struct Account(String);

/// A stand-in for a gateway that deduplicates by a key.
#[derive(Clone, Default)]
struct Gateway {
    charges: Arc<Mutex<Vec<String>>>,
    answered: Arc<Notify>,
}

impl Gateway {
    /// It charges at the first request, and answers from the second one on.
    fn charge(&self, account: &str, cents: i64, key: String) -> Option<String> {
        let mut charges = self.charges.lock().ok()?;
        if charges.contains(&key) {
            println!("the gateway knows the key");
            self.answered.notify_one();
            return Some(format!("ch_{}", charges.len()));
        }
        println!("the gateway charges {cents} cents of {account} under a key of {} digits", key.len());
        charges.push(key);
        None
    }
}

async fn pay(
    Extension(gateway): Extension<Gateway>,
    Extension(Account(account)): Extension<Account>,
    LeasedBody(lease, Json(cents)): LeasedBody<Json<i64>>,
) -> Result<(StatusCode, String), StatusCode> {
    let charge = gateway.charge(&account, cents, lease.downstream_key());
    Ok((StatusCode::CREATED, charge.ok_or(StatusCode::SERVICE_UNAVAILABLE)?))
}

/// A stand-in for your authentication.
async fn authenticate(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(Account("ada".to_owned()));
    next.run(request).await
}

/// Whether the user may still pay. A real service asks its database.
async fn decide(key: &Key, request: &mut axum::http::Request<Bytes>) -> Result<Decision, sqlx::Error> {
    if key.scope() != "ada" {
        return Ok(Decision::Refuse("the account is closed".to_owned()));
    }
    request.extensions_mut().insert(Account(key.scope().to_owned()));
    Ok(Decision::Resume)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Without a database, sqlx would wait for 30 seconds, and no client waits so long for its 503.
    let pool =
        PgPoolOptions::new().acquire_timeout(Duration::from_secs(3)).connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    let options = LeaseOptions::new(POLICY).retention(RETENTION).store_request(true).max_attempts(ATTEMPTS);
    let layer = IdempotencyLayer::leased(pool, options.resume_after(RESUME_AFTER), |request| {
        let Account(id) = request.extensions.get().ok_or(StatusCode::UNAUTHORIZED)?;
        Ok(id.clone())
    });
    let gateway = Gateway::default();
    // A request with another method has no handler, so it frees its key.
    let routes = Router::new().route("/payments", post(pay)).method_not_allowed_fallback(method_not_allowed);
    let routes = routes.route_layer(layer.clone()).layer(Extension(gateway.clone()));
    let app = routes.clone().layer(middleware::from_fn(authenticate));

    let key = uuid::Uuid::new_v4().to_string();
    let request =
        || Request::post("/payments").header("Idempotency-Key", &key).header("Content-Type", "application/json");
    let failed = app.clone().oneshot(request().body(Body::from("1250"))?).await?;
    println!("the client hears {}, and does not come back", failed.status());
    // In a service this runs in a task of its own, until the service ends.
    let resumer = RequestResumer::new(&layer, "POST /payments")?.interval(Duration::from_millis(100));
    resumer.run(gateway.answered.notified(), decide, routes).await;
    let retry = app.oneshot(request().body(Body::from("1250"))?).await?;
    let (status, replayed) = (retry.status(), retry.headers().contains_key("idempotent-replayed"));
    let charge = axum::body::to_bytes(retry.into_body(), 1024).await?;
    println!("a late retry: {status}, replayed: {replayed}, {}", String::from_utf8_lossy(&charge));
    ensure!(replayed && gateway.charges.lock().is_ok_and(|charges| charges.len() == 1), "not exactly once");
    Ok(())
}
