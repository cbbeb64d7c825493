//! The HTTP layer over the bare handler, on real sockets; and a storm through it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::ensure;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Extension, Router};
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use pg_idempotency::{Idempotency, InFlight, RoundTrips};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::alternatives::handler;
use crate::bench::Bench;
use crate::client::{effect, next_call, response, spread};
use crate::measure::{Measured, interleave};
use crate::report::Report;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
The requests go over loopback to a service in the same process, with a pool of 10, the transactional layer and 300 B of \
response. *Bare handler* begins, inserts and commits, on the same pool. The *hand-made handler* is idempotent without the \
crate: it inserts, selects and updates in the crate's table, and checks the key and the body as the layer does. In the storm, 200 clients send the same key at once. \
Their request takes as long as the whole measurement of two other clients, which use their own keys. A client that gets a \
409 asks again after a second. Both ends of all 202 connections run on the same cores.";

const NAME: &str = "http";
pub(crate) const BARE: &str = "bare handler";
pub(crate) const FIRST_CALL: &str = "first call";
const HOT: &str = "hot";
const POOL: usize = 10;
const STORM: usize = 200;

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    for setting in bench.settings() {
        bench.clear().await?;
        let service = Service::start(setting.pool(POOL).await?).await?;
        for path in ["/reject", "/select-first"] {
            let answer = service.caller.post(path, HOT, Duration::ZERO).await?;
            ensure!(answer == Answer { status: 200, replayed: false }, "{answer:?}");
        }
        let answer = service.caller.post("/by-hand", HOT, Duration::ZERO).await?;
        ensure!(answer == Answer { status: 200, replayed: false }, "{answer:?}");
        let bare = service.way(BARE, |_| ("/bare", String::new(), false));
        let first = service.way(FIRST_CALL, |call| ("/reject", spread(call), false));
        let fewest = service.way("first call, fewest round trips", |call| ("/fewest", spread(call), false));
        let replay = service.way("replay", |_| ("/reject", HOT.to_owned(), true));
        let selected = service.way("replay, select first", |_| ("/select-first", HOT.to_owned(), true));
        let by_hand = service.way(handler::NAME, |call| ("/by-hand", spread(call), false));
        let replay_by_hand = service.way("hand-made handler, replay", |_| ("/by-hand", HOT.to_owned(), true));
        let ways = vec![bare, by_hand, replay_by_hand, first, fewest, replay, selected];
        let measured = interleave(bench, setting, 8, ways).await?;
        report.speeds(NAME, "8 clients", setting.told(), "requests", &measured);
        for one in &measured[3..] {
            let what = format!("HTTP, {}: rate over that of the bare handler", one.way.name);
            report.figure(NAME, what, setting.told(), Some(one.against(&measured[0])));
            let by_hand = if one.way.name.starts_with("replay") { &measured[2] } else { &measured[1] };
            let what = format!("HTTP, {}: rate over that of the hand-made handler", one.way.name);
            report.figure(NAME, what, setting.told(), Some(one.against(by_hand)));
        }
        if setting.rtt.is_some() {
            service.task.abort();
            continue;
        }
        for (name, path) in [("Wait", "/wait"), ("Reject", "/reject")] {
            let measured = storm(bench, &service, path).await?;
            let title = format!("Other keys beside {STORM} duplicates of one, {name}");
            report.speeds(NAME, title, setting.told(), "requests", &measured);
            let later = measured[1].percentile(0.99) - measured[0].percentile(0.99);
            let what = format!("Storm over HTTP, {name}: ms that it adds to other keys' p99");
            report.figure(NAME, what, setting.told(), Some(later));
        }
        service.task.abort();
    }
    bench.clear().await
}

struct Service {
    caller: Caller,
    task: JoinHandle<()>,
}

#[derive(Clone)]
struct Caller {
    address: SocketAddr,
    client: reqwest::Client,
}

#[derive(Debug, PartialEq)]
struct Answer {
    status: u16,
    replayed: bool,
}

impl Service {
    async fn start(pool: PgPool) -> anyhow::Result<Self> {
        let layer = |options| IdempotencyLayer::transactional(pool.clone(), options, |_| Ok("bench".to_owned()));
        let saving = |round_trips| layer(Idempotency::new().with_round_trips(round_trips));
        let waits = Idempotency::new().with_in_flight(InFlight::Wait(Duration::from_secs(20)))?;
        let answer = response(300);
        let work = {
            let answer = answer.clone();
            async move |headers: HeaderMap, mut tx: IdempotentTx| {
                effect(&mut tx).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
                // Only in the storm: the timer of a sleep rounds up to a millisecond.
                if let Some(work) = headers.get("x-work-ms").and_then(|ms| ms.to_str().ok()?.parse().ok()) {
                    sleep(Duration::from_millis(work)).await;
                }
                Ok::<_, StatusCode>(answer.clone())
            }
        };
        let shop = handler::Shop { pool: pool.clone(), answer: answer.clone() };
        let bare = async move |Extension(pool): Extension<PgPool>| {
            let unavailable = |_: sqlx::Error| StatusCode::SERVICE_UNAVAILABLE;
            let mut tx = pool.begin().await.map_err(unavailable)?;
            effect(&mut tx).await.map_err(unavailable)?;
            tx.commit().await.map_err(unavailable)?;
            Ok::<_, StatusCode>(answer.clone())
        };
        let app = Router::new()
            .route("/fewest", post(work.clone()).layer(saving(RoundTrips::Fewest)))
            .route("/select-first", post(work.clone()).layer(saving(RoundTrips::SelectFirst)))
            .route("/reject", post(work.clone()).layer(layer(Idempotency::new())))
            .route("/wait", post(work).layer(layer(waits)))
            .route("/by-hand", post(handler::handler).layer(Extension(shop)))
            .route("/bare", post(bare).layer(Extension(pool)));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap_or_default() });
        Ok(Self { caller: Caller { address, client: reqwest::Client::builder().no_proxy().build()? }, task })
    }

    /// Requests of a path and a key, and whether they are replayed.
    fn way(&self, name: &str, request: fn(u64) -> (&'static str, String, bool)) -> Way {
        let caller = self.caller.clone();
        Way::new(name, move |_, call| {
            let (caller, (path, key, replayed)) = (caller.clone(), request(call));
            Box::pin(async move {
                let answer = caller.post(path, &key, Duration::ZERO).await?;
                ensure!(answer == Answer { status: 200, replayed }, "{answer:?}");
                Ok(())
            })
        })
    }
}

impl Caller {
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

    /// One caller of the storm, who comes back until he is answered.
    async fn insist(self, path: &'static str, key: String, work: Duration) -> anyhow::Result<()> {
        loop {
            match self.post(path, &key, work).await?.status {
                200 => return Ok(()),
                // As `Retry-After` says.
                409 => sleep(Duration::from_secs(1)).await,
                status => anyhow::bail!("{status}"),
            }
        }
    }

    /// Others at a steady pace.
    async fn pace(self, path: &'static str, end: Instant) -> anyhow::Result<Vec<f64>> {
        let mut latencies = Vec::new();
        while Instant::now() < end {
            let sent = Instant::now();
            let answer = self.post(path, &spread(next_call()), Duration::ZERO).await?;
            ensure!(answer == Answer { status: 200, replayed: false }, "{answer:?}");
            latencies.push(sent.elapsed().as_secs_f64() * 1e3);
            sleep(Duration::from_millis(5)).await;
        }
        Ok(latencies)
    }
}

async fn storm(bench: &Bench, service: &Service, path: &'static str) -> anyhow::Result<[Measured; 2]> {
    let nothing = |name| Measured::of_rounds(Way::new(name, |_, _| Box::pin(async { Ok(()) })));
    let mut measured = ["alone", "beside the storm"].map(nothing);
    let length = bench.scale.slice * 2;
    for _ in 0..bench.scale.rounds.min(3) {
        for (at, one) in measured.iter_mut().enumerate() {
            let (end, key) = (Instant::now() + length, spread(next_call()));
            let insist = |_| tokio::spawn(service.caller.clone().insist(path, key.clone(), length));
            let storm: Vec<_> = (0..STORM * at).map(insist).collect();
            let paced = [(); 2].map(|()| tokio::spawn(service.caller.clone().pace(path, end)));
            let mut latencies = Vec::new();
            for task in paced {
                latencies.extend(task.await??);
            }
            for task in storm {
                task.await??;
            }
            one.add(latencies.len() as f64 / length.as_secs_f64(), latencies);
        }
    }
    Ok(measured)
}
