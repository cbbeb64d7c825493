//! script/with-postgres cargo run --example webhook
//!
//! A receiver of webhooks, whose sender delivers each event at least once: mark mode, in the handler's transaction.
//!
//! ```text
//! evt_1: First
//! answered 200 OK
//! evt_1: Duplicate
//! answered 200 OK
//! evt_1: Duplicate
//! answered 200 OK
//! 1 payment
//! ```

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use pg_idempotency::mark::{Marked, mark};
use pg_idempotency::{Error, Key};
use serde::Deserialize;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

/// Longer than the sender retries.
const WINDOW: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Clone, Deserialize)]
struct Event {
    /// The sender's id of the event. A retry has the same.
    id: String,
    invoice: String,
    cents: i64,
}

/// The route's handler. Verify the sender's signature before this.
async fn receive(State(pool): State<PgPool>, Json(event): Json<Event>) -> StatusCode {
    match process(&pool, &event).await {
        // The sender needs only this answer, so a duplicate is acknowledged like the first delivery.
        Ok(marked) => {
            println!("{}: {marked:?}", event.id);
            StatusCode::OK
        }
        // Also an `Error::InFlight`: the first delivery may still fail, so the sender has to ask again. Some senders
        // take a 409 as final.
        Err(error) => {
            eprintln!("{}: {error}", event.id);
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

async fn process(pool: &PgPool, event: &Event) -> Result<Marked, Error> {
    let key = Key::new("billing.example", "invoice.paid", &event.id)?;
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

    // In a service: Router::new().route("/webhooks", post(receive)).with_state(pool)
    let event = Event { id: "evt_1".to_owned(), invoice: "2026-17".to_owned(), cents: 1250 };
    for _delivery in 0..3 {
        let status = receive(State(pool.clone()), Json(event.clone())).await;
        println!("answered {status}");
    }
    let payments: i64 = sqlx::query_scalar("select count(*) from payment").fetch_one(&pool).await?;
    println!("{payments} payment");
    Ok(())
}
