//! The receiver: a delivery comes in, and the sender hears whether to deliver it again.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::HeaderMap;
use axum::routing::post;
use axum::{Json, Router};
use pg_idempotency::mark::{Marked, Marking};
use pg_idempotency::{InFlight, Key};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::event::Event;
use crate::refusal::Refusal;
use crate::signature::{HEADER, Secret};

/// **It must outlast the sender's redelivery schedule**: a delivery that comes after it is processed a second time.
/// Stripe delivers for three days by itself, and resends events that are up to 30 days old on request. A few days more
/// cost a few rows.
const WINDOW: Duration = Duration::from_secs(35 * 24 * 60 * 60);

/// A duplicate of an event that is being processed is told to come back, and not waited with: the sender has a queue
/// and all the time there is, and the receiver a few connections.
const EVENTS: Marking = match Marking::new(WINDOW) {
    Ok(marking) => match marking.with_in_flight(InFlight::Reject) {
        Ok(marking) => marking,
        Err(_) => panic!("rejecting takes no time"),
    },
    Err(_) => panic!("35 days are a window"),
};

/// An event is a few hundred bytes, and nobody has to be authenticated to send a body.
const BODY_LIMIT: usize = 64 * 1024;

/// Where one sender's events arrive.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) pool: PgPool,
    /// The scope of the key. It comes from the signature, because only the sender has the secret. Two senders may have
    /// events with the same id.
    pub(crate) sender: String,
    pub(crate) secret: Secret,
    /// Stands in for a bug or an outage: the events that fail when they are first processed.
    pub(crate) failing: Arc<Mutex<HashSet<String>>>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Received {
    pub(crate) duplicate: bool,
}

async fn receive(State(endpoint): State<Endpoint>, headers: HeaderMap, body: Bytes) -> Result<Json<Received>, Refusal> {
    // Before anything is marked. A forged event under a real one's id would make the real one a duplicate.
    let signature = headers.get(HEADER).and_then(|value| value.to_str().ok()).unwrap_or_default();
    endpoint.secret.verify(signature, &body, SystemTime::now())?;

    let event: Event = serde_json::from_slice(&body).map_err(Refusal::malformed)?;
    let key = Key::new(&endpoint.sender, "account.event", &event.id).map_err(Refusal::malformed)?;

    // Every `?` from here on, and a sender that hangs up, drops the transaction and the mark with it: the redelivery
    // will be the first.
    let mut tx = endpoint.pool.begin().await?;
    let marked = EVENTS.mark(&mut tx, &key).await?;
    if marked == Marked::First {
        event.process(&mut tx).await?;
        if endpoint.failing.lock().is_ok_and(|mut failing| failing.remove(&event.id)) {
            return Err(Refusal::Failed);
        }
    }
    // Not `tx.commit()`, which says Ok after an error that somebody has swallowed, and saves nothing. Should the COMMIT
    // go through and its answer get lost, the sender hears of an error and delivers again: a duplicate.
    pg_idempotency::commit(tx).await?;

    // Only now: who acknowledges an event that is not committed will not get it again.
    Ok(Json(Received { duplicate: marked == Marked::Duplicate }))
}

pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    pool: PgPool,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
}

impl Receiver {
    pub(crate) async fn start(endpoint: Endpoint) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on a loopback port")?;
        let address = listener.local_addr()?;
        let pool = endpoint.pool.clone();
        let router = Router::new()
            .route("/webhooks", post(receive))
            .layer(DefaultBodyLimit::max(BODY_LIMIT))
            .with_state(endpoint);
        let (stop, stopping) = oneshot::channel();
        let server = axum::serve(listener, router).with_graceful_shutdown(async {
            let _ = stopping.await;
        });
        Ok(Self { address, pool, stop, serving: tokio::spawn(server.into_future()) })
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        drop(self.stop);
        self.serving.await??;
        self.pool.close().await;
        Ok(())
    }
}
