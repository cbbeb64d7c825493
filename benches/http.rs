//! What the HTTP layer costs over the bare handler, and what a storm on one key does to the others.
//!
//! `PG_FSYNC=on cargo bench --features axum --bench http`; `SECONDS=0.2` for a smoke run. Real sockets on loopback. The cases
//! take turns in one run, so that a machine that drifts favours none; the ratios of the medians are what to look at.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Extension, Router};
use pg_idempotency::InFlight;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tokio::net::TcpListener;
use tokio::time::sleep;

const CLIENTS: usize = 8;
const ROUNDS: usize = 7;
const STORM: usize = 200;
const POOL: u32 = 10;
/// 300 bytes, as an ordinary answer has.
const ANSWER: [u8; 300] = [b'x'; 300];

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let slice = std::env::var("SECONDS").ok().map(|seconds| seconds.parse()).transpose()?.unwrap_or(1.0);
    let slice = Duration::from_secs_f64(slice);
    let pool = PgPoolOptions::new().max_connections(POOL).connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&mut *pool.acquire().await?).await?;
    sqlx::raw_sql("create table if not exists bench_effect (id bigint generated always as identity, note text)")
        .execute(&pool)
        .await?;
    let server = Server::start(&pool).await?;
    overhead(&server, slice).await?;
    for (name, path, reject) in [("reject", "/reject", true), ("wait", "/wait", false)] {
        storm(&server, name, path, reject, slice).await?;
    }
    Ok(())
}

#[derive(Clone)]
struct Server {
    address: SocketAddr,
    client: reqwest::Client,
}

impl Server {
    async fn start(pool: &PgPool) -> anyhow::Result<Self> {
        let layer = |in_flight| -> anyhow::Result<_> {
            let layer = IdempotencyLayer::transactional(pool.clone(), |_| Ok("bench".to_owned()));
            Ok(layer.with_in_flight(in_flight)?)
        };
        let work = async |headers: HeaderMap, mut tx: IdempotentTx| {
            let answer = effect(&mut tx).await;
            let work = headers.get("x-work-ms").and_then(|ms| ms.to_str().ok()?.parse().ok());
            sleep(Duration::from_millis(work.unwrap_or_default())).await;
            answer
        };
        let bare = async |Extension(pool): Extension<PgPool>| {
            let mut tx = pool.begin().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
            let answer = effect(&mut tx).await?;
            tx.commit().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
            Ok::<_, StatusCode>(answer)
        };
        let app = Router::new()
            .route("/reject", post(work).layer(layer(InFlight::Reject)?))
            .route("/wait", post(work).layer(layer(InFlight::Wait(Duration::from_secs(20)))?))
            .route("/bare", post(bare).layer(Extension(pool.clone())));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, app).into_future());
        Ok(Self { address, client: reqwest::Client::builder().no_proxy().build()? })
    }

    async fn post(&self, path: &str, key: &str, work: Duration) -> anyhow::Result<reqwest::StatusCode> {
        let request = self.client.post(format!("http://{}{path}", self.address)).header("idempotency-key", key);
        let request = request.header("x-work-ms", work.as_millis().to_string());
        let response = request.body("{\"amount\":1250}").send().await?;
        let status = response.status();
        response.bytes().await?;
        Ok(status)
    }
}

async fn effect(conn: &mut PgConnection) -> Result<Vec<u8>, StatusCode> {
    sqlx::query("insert into bench_effect (note) values ('x')")
        .execute(conn)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(ANSWER.to_vec())
}

#[derive(Clone, Copy)]
enum Case {
    Bare,
    First,
    Replay,
}

async fn overhead(server: &Server, slice: Duration) -> anyhow::Result<()> {
    let cases = [Case::Bare, Case::First, Case::Replay];
    let mut rates = cases.map(|_| Vec::new());
    for round in 0..=ROUNDS {
        for (at, case) in cases.into_iter().enumerate() {
            let rate = requests_per_second(server, case, round, slice).await?;
            // The first round warms connections and statements.
            if round > 0 {
                rates[at].push(rate);
            }
        }
    }
    let [bare, first, replay] = rates.map(median);
    println!("bare handler  {bare:>7.0} requests/s");
    println!("first call    {first:>7.0} requests/s, {:.2} of bare", first / bare);
    println!("replay        {replay:>7.0} requests/s, {:.2} of bare", replay / bare);
    Ok(())
}

async fn requests_per_second(server: &Server, case: Case, round: usize, slice: Duration) -> anyhow::Result<f64> {
    let started = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let server = server.clone();
            tokio::spawn(async move {
                let mut sent = 0;
                while started.elapsed() < slice {
                    let (path, key, expected) = match case {
                        Case::Bare => ("/bare", String::new(), 200),
                        Case::First => ("/reject", format!("{round}-{client}-{sent}"), 200),
                        Case::Replay => ("/reject", format!("replayed-{client}"), 200),
                    };
                    let status = server.post(path, &key, Duration::ZERO).await?;
                    anyhow::ensure!(status == expected, "{status}");
                    sent += 1;
                }
                anyhow::Ok(sent)
            })
        })
        .collect();
    let mut sent = 0;
    for client in clients {
        sent += client.await??;
    }
    Ok(f64::from(sent) / started.elapsed().as_secs_f64())
}

/// Others at a steady pace, by turns alone and beside 200 duplicates of one request that takes 2 seconds.
async fn storm(server: &Server, name: &str, path: &'static str, reject: bool, slice: Duration) -> anyhow::Result<()> {
    let (mut calm, mut stormy, mut told) = (Vec::new(), Vec::new(), 0);
    let work = slice.min(Duration::from_secs(1)) * 2;
    for round in 0..3 {
        calm.extend(others(server, path, &format!("calm-{name}-{round}"), slice).await?);
        let key = format!("storm-{name}-{round}");
        let duplicates: Vec<_> = (0..STORM)
            .map(|_| {
                let (server, key) = (server.clone(), key.clone());
                tokio::spawn(async move {
                    let mut told = 0;
                    loop {
                        match server.post(path, &key, work).await?.as_u16() {
                            200 => return anyhow::Ok(told),
                            409 if reject => told += 1,
                            status => anyhow::bail!("{status}"),
                        }
                        // As `Retry-After` says.
                        sleep(Duration::from_secs(1)).await;
                    }
                })
            })
            .collect();
        stormy.extend(others(server, path, &key, work).await?);
        for duplicate in duplicates {
            told += duplicate.await??;
        }
    }
    let (calm, stormy) = (p99(calm), p99(stormy));
    println!(
        "storm, {name:<6} other keys' p99 {:>6.1} ms alone, {:>6.1} ms beside {STORM} duplicates ({:+.1} ms, at most +50 wanted); \
         {told} times 409",
        calm.as_secs_f64() * 1e3,
        stormy.as_secs_f64() * 1e3,
        (stormy.as_secs_f64() - calm.as_secs_f64()) * 1e3,
    );
    Ok(())
}

async fn others(server: &Server, path: &'static str, run: &str, length: Duration) -> anyhow::Result<Vec<Duration>> {
    let started = Instant::now();
    let clients: Vec<_> = (0..2)
        .map(|client| {
            let (server, run) = (server.clone(), run.to_owned());
            tokio::spawn(async move {
                let mut latencies = Vec::new();
                while started.elapsed() < length {
                    let key = format!("other-{run}-{client}-{}", latencies.len());
                    let sent = Instant::now();
                    let status = server.post(path, &key, Duration::ZERO).await?;
                    anyhow::ensure!(status == 200, "{status}");
                    latencies.push(sent.elapsed());
                    sleep(Duration::from_millis(5)).await;
                }
                anyhow::Ok(latencies)
            })
        })
        .collect();
    let mut latencies = Vec::new();
    for client in clients {
        latencies.extend(client.await??);
    }
    Ok(latencies)
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn p99(mut latencies: Vec<Duration>) -> Duration {
    latencies.sort();
    latencies[latencies.len() * 99 / 100]
}
