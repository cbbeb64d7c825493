//! How much of the heap one request takes while it waits. `script/bench` builds this program beside the benchmarks,
//! because the allocator of this program counts, and would make the benchmarks slower. Each line of the output has a
//! name and a number of bytes.

use std::alloc::System;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, LeasedBody};
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Idempotency, migrate};
use sqlx::postgres::PgPoolOptions;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower::ServiceExt as _;

#[global_allocator]
static COUNTED: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const REQUESTS: usize = 2000;
const BODY: usize = 300;
const CONNECTIONS: u32 = 4;

/// Where the handlers of a situation wait, and how many of them do.
#[derive(Clone)]
struct Gate(Arc<Semaphore>);

impl Gate {
    fn closed() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }

    async fn pass(&self) {
        let _ = self.0.acquire().await;
    }

    fn open(&self) {
        self.0.close();
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect(&std::env::var("DATABASE_URL")?).await?;
    migrate(&pool).await?;
    let scope = |_: &_| Ok("account:1".to_owned());
    let leasing = LeaseOptions::new(Policy::AtMostOnce { lease: Duration::from_secs(300) });

    let gate = Gate::closed();
    let waits = gate.clone();
    let bare = post(async move |_: String| waits.pass().await);
    print("handler without the layer", &Router::new().route("/", bare), &gate).await?;

    let gate = Gate::closed();
    let waits = gate.clone();
    let leased = post(async move |LeasedBody(lease, _): LeasedBody<String>| {
        waits.pass().await;
        drop(lease);
    });
    let layer = IdempotencyLayer::leased(pool.clone(), leasing, scope);
    let layer = layer.max_runs(REQUESTS).max_runs_of_one_scope(REQUESTS);
    print("running under a lease", &Router::new().route("/", leased.layer(layer)), &gate).await?;

    let gate = Gate::closed();
    let waits = gate.clone();
    let transactional = post(async move |tx: IdempotentTx, _: String| {
        waits.pass().await;
        drop(tx);
    });
    let layer = IdempotencyLayer::transactional(pool.clone(), Idempotency::new(), scope);
    print("waiting for a place", &Router::new().route("/", transactional.layer(layer)), &gate).await?;
    pool.close().await;
    Ok(())
}

/// Prints what one of many requests takes, all of which wait in the handler or before it. A first request fills the
/// caches.
async fn print(name: &str, router: &Router, gate: &Gate) -> anyhow::Result<()> {
    let warm = send(name, router, 0)?;
    let before = settled().await;
    let mut waiting = vec![warm];
    waiting.reserve(REQUESTS);
    for number in 1..=REQUESTS {
        waiting.push(send(name, router, number)?);
    }
    let taken = settled().await - before;
    let ended = waiting.iter().filter(|request| request.is_finished()).count();
    gate.open();
    let mut statuses = BTreeMap::new();
    for request in waiting {
        *statuses.entry(request.await?).or_insert(0) += 1;
    }
    ensure!(ended == 0, "{ended} requests of *{name}* have ended too early: {statuses:?}");
    println!("{name}: {}", taken / REQUESTS);
    Ok(())
}

fn send(name: &str, router: &Router, number: usize) -> anyhow::Result<JoinHandle<StatusCode>> {
    let request = Request::post("/")
        .header("idempotency-key", format!("{}-{number}", name.replace(' ', "-")))
        .body("x".repeat(BODY))?;
    let answering = router.clone().oneshot(request.map(Body::from));
    Ok(tokio::spawn(async move { answering.await.map_or_else(|never| match never {}, |response| response.status()) }))
}

/// The bytes of the heap that are in use, when they have not changed for a while.
async fn settled() -> usize {
    let in_use = || {
        let stats = COUNTED.stats();
        stats.bytes_allocated - stats.bytes_deallocated
    };
    let mut before = in_use();
    loop {
        sleep(Duration::from_millis(500)).await;
        let now = in_use();
        if now.abs_diff(before) < REQUESTS {
            return now;
        }
        before = now;
    }
}
