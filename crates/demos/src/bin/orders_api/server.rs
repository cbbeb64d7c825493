//! The routes, and what a request comes through before it is performed.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::Method;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, patch, post};
use pg_idempotency::Idempotency;
use pg_idempotency::http::{IdempotencyLayer, Runs};
use pg_idempotency::lease::{Leasing, Policy};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::gateway::Gateway;
use crate::{auth, orders, signature, text};

/// An order is a few hundred bytes.
pub(crate) const BODY_LIMIT: usize = 16 * 1024;

/// Far longer than the gateway takes. It is renewed while the handler runs, so this is what a crash costs.
const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: Duration::from_secs(40) };

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) pool: PgPool,
    pub(crate) gateway: Arc<Gateway>,
}

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pool: PgPool,
    runs: [Runs; 2],
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
}

impl Server {
    pub(crate) async fn start(pool: PgPool, gateway: Arc<Gateway>) -> anyhow::Result<Self> {
        // DELETE is idempotent by HTTP, but what it answers is not: with a key, the repeat hears the same.
        let transactional = IdempotencyLayer::transactional(pool.clone(), Idempotency::new(), auth::scope)
            .with_methods([Method::POST, Method::PATCH, Method::DELETE]);
        let leased = IdempotencyLayer::leased(pool.clone(), Leasing::new(AT_MOST_ONCE)?, auth::scope);
        let runs = [transactional.runs(), leased.runs()];
        let service = Service { pool: pool.clone(), gateway };

        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on a loopback port")?;
        let address = listener.local_addr()?;
        let (stop, stopping) = oneshot::channel();
        let server = axum::serve(listener, router(service, transactional, leased)).with_graceful_shutdown(async {
            let _ = stopping.await;
        });
        Ok(Self { address, pool, runs, stop, serving: tokio::spawn(server.into_future()) })
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        drop(self.stop);
        self.serving.await??;
        for runs in &self.runs {
            runs.finished().await;
        }
        self.pool.close().await;
        Ok(())
    }
}

fn router(service: Service, transactional: IdempotencyLayer, leased: IdempotencyLayer) -> Router {
    let pool = service.pool.clone();
    let in_the_database = Router::new()
        .route("/orders", get(orders::list).post(orders::create))
        .route("/orders/{id}", patch(orders::redirect).delete(orders::cancel))
        .route("/orders/{id}/complete", post(orders::complete))
        .route_layer(transactional);
    let outside = Router::new().route("/orders/{id}/text", post(text::send)).route_layer(leased);

    // Of layers the last comes first. A replay passes all of these again, and so whoever may not ask any more is told
    // nothing; and what they refuse never takes a key.
    in_the_database
        .merge(outside)
        .layer(from_fn(signature::check)) // 3. Reads the body,
        .layer(DefaultBodyLimit::max(BODY_LIMIT)) // 2. whose size is bounded,
        .layer(from_fn_with_state(pool, auth::authenticate)) // 1. of somebody who is known.
        .with_state(service)
}
