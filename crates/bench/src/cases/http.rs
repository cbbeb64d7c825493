//! The HTTP layer beside a bare and a hand-made handler, on real sockets; and a storm through it.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::ensure;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Extension, Router};
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use pg_idempotency::{Idempotency, OnDuplicate};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::time::sleep;

use super::storm::storm;
use crate::alternatives::handler;
use crate::bench::Bench;
use crate::client::{effect, response, spread};
use crate::measure::compare;
use crate::results::{MAIN, Table};
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const NAME: &str = "http";

pub(crate) const BARE: &str = "bare handler";
pub(crate) const BY_HAND_REPLAY: &str = "hand-made handler, replay";
pub(crate) const FIRST_CALL: &str = "first call";
pub(crate) const REPLAY: &str = "replay";
pub(crate) const REPLAY_FIRST: &str = "replay, with replay_first";
pub(crate) const STORM: &str = "Other keys beside 200 duplicates of one, over HTTP";
const HOT: &str = "hot";
const POOL: usize = 10;
const DUPLICATES: usize = 200;

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    for setting in bench.settings() {
        bench.clear().await?;
        let service = Service::start(setting.pool(POOL).await?).await?;
        for path in ["/reject", "/replay-first", "/by-hand"] {
            let answer = service.post(path, HOT, Duration::ZERO).await?;
            ensure!(answer == Answer { status: 200, replayed: false }, "{answer:?}");
        }
        let first = service.way(FIRST_CALL, |call| ("/reject", spread(call), false));
        let ways = [
            service.way(BARE, |_| ("/bare", String::new(), false)),
            service.way(handler::NAME, |call| ("/by-hand", spread(call), false)),
            first.clone(),
            service.way(BY_HAND_REPLAY, |_| ("/by-hand", HOT.to_owned(), true)),
            service.way(REPLAY, |_| ("/reject", HOT.to_owned(), true)),
            service.way(REPLAY_FIRST, |_| ("/replay-first", HOT.to_owned(), true)),
        ];
        tables.push(Table::new(MAIN, setting.column(), "requests", compare(bench, setting, 8, &ways).await?));
        if !std::ptr::eq(setting, bench.socket()) {
            continue;
        }
        for (name, path) in [("Wait", "/wait"), ("Reject", "/reject")] {
            let duplicate = |hot, work| service.clone().insist(path, spread(hot), work);
            let rows = storm(bench, bench.scale.slice * 2, DUPLICATES, duplicate, 2, &first).await?;
            tables.push(Table::new(STORM, name, "requests", rows));
        }
    }
    bench.clear().await?;
    Ok(tables)
}

/// The layer and the hand-made handler, for a first call and for a replay.
pub(crate) async fn beside_by_hand(setting: &Setting) -> anyhow::Result<Vec<Way>> {
    let service = Service::start(setting.pool(POOL).await?).await?;
    for path in ["/reject", "/by-hand"] {
        service.post(path, HOT, Duration::ZERO).await?;
    }
    Ok(vec![
        service.way(handler::NAME, |call| ("/by-hand", spread(call), false)),
        service.way(FIRST_CALL, |call| ("/reject", spread(call), false)),
        service.way(BY_HAND_REPLAY, |_| ("/by-hand", HOT.to_owned(), true)),
        service.way(REPLAY, |_| ("/reject", HOT.to_owned(), true)),
    ])
}

/// A running service, and a client of it.
#[derive(Clone)]
struct Service {
    address: SocketAddr,
    client: reqwest::Client,
}

#[derive(Debug, PartialEq)]
struct Answer {
    status: u16,
    replayed: bool,
}

impl Service {
    /// It runs until the program ends.
    async fn start(pool: PgPool) -> anyhow::Result<Self> {
        let layer = |options| IdempotencyLayer::transactional(pool.clone(), options, |_| Ok("bench".to_owned()));
        let waits = Idempotency::new().on_duplicate(OnDuplicate::Wait(Duration::from_secs(20)));
        let answer = response(300);
        let work = async move |headers: HeaderMap, mut tx: IdempotentTx| {
            effect(&mut tx).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
            // Only a storm's request sleeps, because the timer of a sleep rounds up to a millisecond.
            if let Some(work) = headers.get("x-work-ms").and_then(|ms| ms.to_str().ok()?.parse().ok()) {
                sleep(Duration::from_millis(work)).await;
            }
            Ok::<_, StatusCode>(answer.to_owned())
        };
        let shop = handler::Shop { pool: pool.clone(), answer: answer.to_owned() };
        let bare = async move |Extension(pool): Extension<PgPool>| {
            let unavailable = |_: sqlx::Error| StatusCode::SERVICE_UNAVAILABLE;
            let mut tx = pool.begin().await.map_err(unavailable)?;
            effect(&mut tx).await.map_err(unavailable)?;
            tx.commit().await.map_err(unavailable)?;
            Ok::<_, StatusCode>(answer.to_owned())
        };
        let app = Router::new()
            .route("/replay-first", post(work).layer(layer(Idempotency::new().replay_first(true))))
            .route("/reject", post(work).layer(layer(Idempotency::new())))
            .route("/wait", post(work).layer(layer(waits)))
            .route("/by-hand", post(handler::handler).layer(Extension(shop)))
            .route("/bare", post(bare).layer(Extension(pool)));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { address, client: reqwest::Client::builder().no_proxy().build()? })
    }

    /// Requests of a path and a key, and whether they are replayed.
    fn way(&self, name: &str, request: fn(u64) -> (&'static str, String, bool)) -> Way {
        let service = self.clone();
        Way::new(name, move |_, call| {
            let (service, (path, key, replayed)) = (service.clone(), request(call));
            Box::pin(async move {
                let answer = service.post(path, &key, Duration::ZERO).await?;
                ensure!(answer == Answer { status: 200, replayed }, "{answer:?}");
                Ok(())
            })
        })
    }

    async fn post(&self, path: &str, key: &str, work: Duration) -> anyhow::Result<Answer> {
        let request = self.client.post(format!("http://{}{path}", self.address)).header("idempotency-key", key);
        let request = match work.as_millis() {
            0 => request,
            work => request.header("x-work-ms", work.to_string()),
        };
        let response = request.body("{\"amount\":1250}").send().await?;
        let answer = Answer {
            status: response.status().as_u16(),
            replayed: response.headers().contains_key("idempotent-replayed"),
        };
        response.bytes().await?;
        Ok(answer)
    }

    /// One request of the storm, which is repeated until it is answered. Says whether it performed.
    async fn insist(self, path: &'static str, key: String, work: Duration) -> anyhow::Result<bool> {
        loop {
            match self.post(path, &key, work).await? {
                Answer { status: 200, replayed } => return Ok(!replayed),
                // As `Retry-After` says.
                Answer { status: 409, .. } => sleep(Duration::from_secs(1)).await,
                Answer { status, .. } => anyhow::bail!("{status}"),
            }
        }
    }
}
