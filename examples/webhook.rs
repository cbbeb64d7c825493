//! script/with-postgres cargo run --example webhook
//!
//! A receiver of webhooks, whose sender delivers each event once or more, and signs the deliveries after
//! [Standard Webhooks](https://www.standardwebhooks.com): mark mode, in the handler's transaction.
//!
//! ```text
//! evt_1: First
//! answered 200 OK
//! evt_1: Duplicate
//! answered 200 OK
//! evt_1: Duplicate
//! answered 200 OK
//! forged, and answered 401 Unauthorized
//! 1 payment
//! ```

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use pg_idempotency::mark::{Marked, mark};
use pg_idempotency::{Error, Key};
use serde::Deserialize;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use standardwebhooks::{HEADER_WEBHOOK_ID, HEADER_WEBHOOK_SIGNATURE, HEADER_WEBHOOK_TIMESTAMP, Webhook};

/// Longer than the sender retries.
const WINDOW: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Clone)]
struct Receiver {
    pool: PgPool,
    /// The secrets that the sender may use: two, while it changes its secret.
    secrets: Arc<[Webhook]>,
}

#[derive(Deserialize)]
struct Event {
    invoice: String,
    cents: i64,
}

/// The route's handler. The signature is verified over the bytes of the body as they arrived, and before the mark:
/// otherwise a forged delivery under the id of a real event would make the real one a duplicate.
async fn receive(State(receiver): State<Receiver>, headers: HeaderMap, body: Bytes) -> StatusCode {
    if !receiver.secrets.iter().any(|secret| secret.verify(&body, &headers).is_ok()) {
        return StatusCode::UNAUTHORIZED;
    }
    let Ok(event) = serde_json::from_slice::<Event>(&body) else { return StatusCode::BAD_REQUEST };
    // The sender's id of the event, which is signed. A retry has the same.
    let id = headers.get(HEADER_WEBHOOK_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
    match process(&receiver.pool, id, &event).await {
        // The sender needs only this answer, so a duplicate is acknowledged like the first delivery.
        Ok(marked) => {
            println!("{id}: {marked:?}");
            StatusCode::OK
        }
        // Also an `Error::InFlight`: the first delivery may still fail, so the sender has to ask again. Some senders
        // take a 409 as final.
        Err(error) => {
            eprintln!("{id}: {error}");
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

async fn process(pool: &PgPool, id: &str, event: &Event) -> Result<Marked, Error> {
    let key = Key::new("billing.example", "invoice.paid", id)?;
    let mut tx = pool.begin().await?;
    let marked = mark(&mut tx, &key, WINDOW).await?;
    if marked == Marked::First {
        sqlx::query("insert into payment (invoice, cents) values ($1, $2)")
            .bind(&event.invoice)
            .bind(event.cents)
            .execute(&mut *tx)
            .await?;
    }
    // The mark and the payment commit together. Only after that is the event acknowledged.
    pg_idempotency::commit(tx).await?;
    Ok(marked)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Without a database, sqlx would wait for 30 seconds, and no client waits so long for its 503.
    let pool =
        PgPoolOptions::new().acquire_timeout(Duration::from_secs(3)).connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql("create table if not exists payment (invoice text not null, cents bigint not null)")
        .execute(&pool)
        .await?;

    // In a service: Router::new().route("/webhooks", post(receive)).with_state(receiver)
    let secret = std::env::var("WEBHOOK_SECRET").unwrap_or_else(|_| "whsec_dGhlIHNlbmRlcidzIHNlY3JldA==".to_owned());
    let receiver = Receiver { pool: pool.clone(), secrets: Arc::new([Webhook::new(&secret)?]) };
    let body = Bytes::from_static(br#"{"invoice":"2026-17","cents":1250}"#);
    let genuine = signed(&Webhook::new(&secret)?, "evt_1", &body)?;
    for _delivery in 0..3 {
        let status = receive(State(receiver.clone()), genuine.clone(), body.clone()).await;
        println!("answered {status}");
    }
    let forged = signed(&Webhook::from_bytes(b"guessed".to_vec())?, "evt_2", &body)?;
    println!("forged, and answered {}", receive(State(receiver), forged, body).await);
    let payments: i64 = sqlx::query_scalar("select count(*) from payment").fetch_one(&pool).await?;
    println!("{payments} payment");
    Ok(())
}

/// The headers of the sender, which signs each delivery anew.
fn signed(secret: &Webhook, id: &str, body: &[u8]) -> anyhow::Result<HeaderMap> {
    let timestamp = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let signature = secret.sign(id, timestamp as i64, body)?;
    Ok(HeaderMap::from_iter([
        (HEADER_WEBHOOK_ID.parse()?, HeaderValue::from_str(id)?),
        (HEADER_WEBHOOK_TIMESTAMP.parse()?, HeaderValue::from(timestamp)),
        (HEADER_WEBHOOK_SIGNATURE.parse()?, HeaderValue::from_str(&signature)?),
    ]))
}
