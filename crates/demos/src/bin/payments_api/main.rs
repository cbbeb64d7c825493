//! A payments API: however often a client asks, it pays once and gets the same answer. All of its idempotency is in one
//! layer, [`payments::idempotency`].
//!
//! ```sh
//! cargo run -p demos --bin payments_api # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! curl -i localhost:8080/payments -H 'X-User-ID: ada' -H 'Idempotency-Key: order-4711-payment' \
//!     -d '{"amount": 1250, "currency": "EUR", "customer_id": "c-17"}'
//! ```
//!
//! `script/demo` runs a client, `payments_demo`, against it. `tests/payments_api.rs` tests its contract.

mod payments;
mod problem;
mod request;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use sqlx::postgres::PgPoolOptions;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use payments::Service;

/// PostgreSQL takes 100 by default, and a deployment runs several of these processes side by side.
const CONNECTIONS: u32 = 16;

/// A duplicate that waits for its first request holds no connection, so this is about real work alone: a 503 is soon
/// enough an answer when there is none to be had.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(3);

/// Below the 30 seconds after which Kubernetes kills.
const DRAIN_LIMIT: Duration = Duration::from_secs(25);

fn main() -> ExitCode {
    let ended = match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => serve(&url),
        _ => Err(demos::on_a_throw_away_server(&[])),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("payments_api: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn serve(url: &str) -> anyhow::Result<()> {
    if env::var("PAYMENTS_EXIT_WITH_PARENT").is_ok_and(|value| value == "1") {
        demos::exit_with_parent();
    }
    let address = env::var("LISTEN_ADDR").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = TcpListener::bind(&address).await.with_context(|| format!("cannot listen on {address}"))?;
    let delay = env::var("PAYMENTS_DELAY_MS").unwrap_or_else(|_| "0".to_owned());
    let delay = Duration::from_millis(delay.parse().context("PAYMENTS_DELAY_MS is no number of milliseconds")?);

    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).acquire_timeout(ACQUIRE_LIMIT);
    let pool = pool.connect(url).await.context("cannot connect to the database")?;
    pg_idempotency::migrate(&pool).await?;
    payments::create_table(&pool).await?;

    let layer = payments::idempotency(pool.clone())?;
    let runs = layer.runs();
    // Registered before the line below: who reads it may send SIGTERM at once, and that must drain, not kill.
    let (mut terminated, mut interrupted) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    println!("listening on http://{}", listener.local_addr()?);
    let (stop, stopping) = oneshot::channel::<()>();
    let server = axum::serve(listener, payments::router(Service { pool, delay }, layer));
    let server = tokio::spawn(server.with_graceful_shutdown(async { drop(stopping.await) }).into_future());

    tokio::select! {
        _ = terminated.recv() => {}
        _ = interrupted.recv() => {}
    }
    let deadline = Instant::now() + DRAIN_LIMIT;
    drop(stop);
    // Nothing was begun of a request that its client never finishes sending: that one may be cut off.
    let _ = timeout_at(deadline, server).await;
    // A client that hung up left its run behind, which no connection waits for.
    timeout_at(deadline, runs.finished()).await.context("a payment took too long and was rolled back")
}
