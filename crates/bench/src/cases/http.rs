//! The HTTP layer beside a bare and a hand-made handler, on real sockets; and a storm through it.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use anyhow::ensure;
use axum::http::request::Parts;
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
/// Clients enough for a queue before the pool.
pub(crate) const MANY: &str = "Requests of 32 clients, with the keys of 1000 users";
const CLIENTS: usize = 32;
const USERS: u64 = 1000;
const POOL: usize = 10;
const DUPLICATES: usize = 200;

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    for setting in bench.settings() {
        bench.clear().await?;
        let service = Service::start(setting.pool(POOL).await?).await?;
        service.store(0..1).await?;
        let bare = service.way(BARE, "/bare", first);
        let of_keys = |replayed: Caller| {
            [
                service.way(handler::NAME, "/by-hand", first),
                service.way(FIRST_CALL, "/reject", first),
                service.way(BY_HAND_REPLAY, "/by-hand", replayed),
                service.way(REPLAY, "/reject", replayed),
                service.way(REPLAY_FIRST, "/replay-first", replayed),
            ]
        };
        let ways = [vec![bare], of_keys(|_| stored(0)).into()].concat();
        tables.push(Table::new(MAIN, setting.column(), "requests", compare(bench, setting, 8, &ways).await?));
        if !std::ptr::eq(setting, bench.socket()) {
            continue;
        }
        service.store(1..USERS).await?;
        let rows = compare(bench, setting, CLIENTS, &of_keys(|call| stored(call % USERS))).await?;
        tables.push(Table::new(MANY, setting.column(), "requests", rows));
        let beside = service.way(FIRST_CALL, "/reject", first);
        for (name, path) in [("Wait", "/wait"), ("Reject", "/reject")] {
            let duplicate = |hot, work| service.clone().insist(path, first(hot), work);
            let rows = storm(bench, bench.scale.slice * 2, DUPLICATES, duplicate, 2, &beside).await?;
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
        service.first(path, &stored(0)).await?;
    }
    Ok(vec![
        service.way(handler::NAME, "/by-hand", first),
        service.way(FIRST_CALL, "/reject", first),
        service.way(BY_HAND_REPLAY, "/by-hand", |_| stored(0)),
        service.way(REPLAY, "/reject", |_| stored(0)),
    ])
}

/// The caller, its key, and whether the key was used before.
#[derive(Clone)]
struct Request {
    user: u64,
    key: String,
    replayed: bool,
}

type Caller = fn(u64) -> Request;

fn first(call: u64) -> Request {
    Request { user: call % USERS, key: spread(call), replayed: false }
}

/// The request that each path has performed for this user.
fn stored(user: u64) -> Request {
    Request { user, key: format!("stored-{user}"), replayed: true }
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
        let scope = |parts: &Parts| Ok(handler::account(&parts.headers).ok_or(StatusCode::UNAUTHORIZED)?.to_owned());
        let layer = |options| IdempotencyLayer::transactional(pool.clone(), options, scope);
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

    fn way(&self, name: &str, path: &'static str, request: Caller) -> Way {
        let service = self.clone();
        Way::new(name, move |_, call| {
            let (service, request) = (service.clone(), request(call));
            Box::pin(async move { service.expect(path, &request, request.replayed).await })
        })
    }

    /// Sends the request of each of these users to each path that replays it.
    async fn store(&self, users: Range<u64>) -> anyhow::Result<()> {
        for user in users {
            for path in ["/reject", "/replay-first", "/by-hand"] {
                self.first(path, &stored(user)).await?;
            }
        }
        Ok(())
    }

    /// Sends a request for the first time.
    async fn first(&self, path: &str, request: &Request) -> anyhow::Result<()> {
        self.expect(path, request, false).await
    }

    async fn expect(&self, path: &str, request: &Request, replayed: bool) -> anyhow::Result<()> {
        let answer = self.post(path, request, Duration::ZERO).await?;
        ensure!(answer == Answer { status: 200, replayed }, "{answer:?}");
        Ok(())
    }

    async fn post(&self, path: &str, request: &Request, work: Duration) -> anyhow::Result<Answer> {
        let Request { user, key, .. } = request;
        let request = self.client.post(format!("http://{}{path}", self.address));
        let request = request.header("idempotency-key", key).header(handler::ACCOUNT, user.to_string());
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
    async fn insist(self, path: &'static str, request: Request, work: Duration) -> anyhow::Result<bool> {
        loop {
            match self.post(path, &request, work).await? {
                Answer { status: 200, replayed } => return Ok(!replayed),
                // As `Retry-After` says.
                Answer { status: 409, .. } => sleep(Duration::from_secs(1)).await,
                Answer { status, .. } => anyhow::bail!("{status}"),
            }
        }
    }
}
