//! Whether a service stays what it is: half an hour of calls at a steady rate, with the janitor running.

use std::time::Duration;

use anyhow::Context as _;
use pg_idempotency::{Error, Idempotency, Janitor};
use sqlx::{PgConnection, PgPool};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout_at};

use crate::bench::Bench;
use crate::client::{BODY, effect, key, next_call, response};
use crate::measure::percentile;

const CALLS_A_SECOND: u32 = 300;
const CLIENTS: u32 = 8;
/// Each fourth call repeats the client's last one.
const REPEATS: u32 = 4;
/// The table stops growing after this time and the time until a vacuum.
const RETENTION: Duration = Duration::from_secs(60);
const MINUTE: Duration = Duration::from_secs(60);
/// By then pool, caches and table have their size.
const SETTLED: usize = 5;

/// What is compared with its value at the settled minute.
struct Minute {
    calls: usize,
    p50: f64,
    p99: f64,
    memory_kib: f64,
    connections: i64,
    table_kib: f64,
    records: i64,
}

pub(crate) async fn run(bench: &Bench, minutes: usize) -> anyhow::Result<()> {
    let setting = &bench.near()[0];
    let pool = setting.pool(10).await?;
    let mut observer = bench.plain().connect(None).await?;
    let janitor = Janitor::new(pool.clone()).with_grace(Duration::ZERO).with_interval(Duration::from_secs(10))?;
    let sweeping = tokio::spawn(janitor.run(std::future::pending()));
    println!(
        "| minute | calls | p50, ms | p99, ms | memory of the clients, MiB | connections | table and indexes, MiB | records |"
    );
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|");
    let started = Instant::now();
    let mut seen = Vec::new();
    for minute in 1..=minutes {
        let end = started + MINUTE * minute as u32;
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            clients.spawn(call_until(pool.clone(), end));
        }
        let mut latencies = Vec::new();
        while let Some(its) = clients.join_next().await {
            latencies.extend(its??);
        }
        latencies.sort_by(f64::total_cmp);
        let now = observe(&mut observer, &latencies).await?;
        let Minute { calls, p50, p99, memory_kib, connections, table_kib, records } = now;
        let (memory, table) = (memory_kib / 1024.0, table_kib / 1024.0);
        println!("| {minute} | {calls} | {p50:.2} | {p99:.2} | {memory:.1} | {connections} | {table:.1} | {records} |");
        seen.push(now);
    }
    sweeping.abort();
    let (Some(settled), Some(last)) = (seen.get(SETTLED - 1), seen.last()) else { return Ok(()) };
    println!("\nThe last minute over minute {SETTLED}:");
    let ratio = |what: &str, of: fn(&Minute) -> f64| println!("- {what}: {:.2}", of(last) / of(settled));
    ratio("p99", |minute| minute.p99);
    ratio("memory", |minute| minute.memory_kib);
    ratio("connections", |minute| minute.connections as f64);
    ratio("table and indexes", |minute| minute.table_kib);
    Ok(())
}

async fn call_until(pool: PgPool, end: Instant) -> anyhow::Result<Vec<f64>> {
    let options = Idempotency::new().with_retention(RETENTION)?;
    let response = response(300);
    let mut ticks = interval(Duration::from_secs(1) * CLIENTS / CALLS_A_SECOND);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut latencies = Vec::new();
    let mut asked = key(next_call())?;
    for n in 1.. {
        if timeout_at(end, ticks.tick()).await.is_err() {
            break;
        }
        let repeats = n % REPEATS == 0;
        if !repeats {
            asked = key(next_call())?;
        }
        let began = Instant::now();
        let outcome = options
            .run(&pool, &asked, BODY, async |conn: &mut PgConnection| -> Result<String, Error> {
                effect(conn).await?;
                Ok(response.clone())
            })
            .await?;
        latencies.push(began.elapsed().as_secs_f64() * 1e3);
        anyhow::ensure!(outcome.is_replayed() == repeats, "a repeat and nothing else is replayed");
    }
    Ok(latencies)
}

async fn observe(conn: &mut PgConnection, latencies: &[f64]) -> anyhow::Result<Minute> {
    // The connections come back to the pool first.
    sleep(Duration::from_millis(100)).await;
    let (table, connections, records): (i64, i64, i64) = sqlx::query_as(
        "select pg_total_relation_size('idempotency.record'),
            (select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()),
            (select count(*) from idempotency.record)",
    )
    .fetch_one(conn)
    .await?;
    let status = std::fs::read_to_string("/proc/self/status").context("the soak reads its memory from /proc")?;
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().split(' ').next()?.parse().ok());
    Ok(Minute {
        calls: latencies.len(),
        p50: percentile(latencies, 0.5),
        p99: percentile(latencies, 0.99),
        memory_kib: memory.context("no VmRSS in /proc/self/status")?,
        connections,
        table_kib: table as f64 / 1024.0,
        records,
    })
}
