//! Whether a service stays what it is: calls at a steady rate for many minutes, with the janitor running.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use pg_idempotency::{Error, Idempotency, Janitor};
use sqlx::{PgConnection, PgPool};
use tokio::time::sleep;

use crate::bench::Bench;
use crate::client::{BODY, effect, key, next_call, response};
use crate::measure::{paced, team};
use crate::results::{Row, Table, rounded};
use crate::way::Way;

pub(crate) const NAME: &str = "soak";

pub(crate) const MINUTES: &str = "Each minute of a steady load";
pub(crate) const MEMORY: &str = "memory, MiB";
pub(crate) const SIZE: &str = "table and indexes, MiB";
const CLIENTS: usize = 8;
/// The time between two calls of one client, so that 8 clients make 300 calls a second.
const PAUSE: Duration = Duration::from_micros(26_667);
/// Each fourth call repeats the one that was made so many calls before: 20 seconds, a part of the retention.
const EARLIER: u64 = 6_001;
const MINUTE: Duration = Duration::from_secs(60);

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let pool = bench.socket().pool(10).await?;
    let mut observer = bench.plain().connect(None).await?;
    let janitor = Janitor::new(pool.clone()).grace(Duration::ZERO).interval(Duration::from_secs(10));
    let sweeping = tokio::spawn(janitor.run(std::future::pending()));
    let way = way(pool)?;
    let mut clients = team(bench.socket(), CLIENTS, None).await?;
    let mut rows = Vec::new();
    for minute in 1..=bench.scale.soak_minutes {
        let sample = paced(&mut clients, &way, MINUTE, PAUSE).await?;
        let mut row = Row::new(minute.to_string(), vec![sample.rate], sample.latencies);
        row.costs = observe(&mut observer).await?;
        eprintln!("  {}", serde_json::to_string(&row)?);
        rows.push(row);
    }
    sweeping.abort();
    Ok(vec![Table::new(MINUTES, bench.socket().column(), "calls", rows)])
}

fn way(pool: PgPool) -> anyhow::Result<Way> {
    let (first, options) = (next_call(), Idempotency::new().retention(MINUTE));
    let response = response(300);
    Ok(Way::new("a call or a replay", move |_, call| {
        let pool = pool.clone();
        Box::pin(async move {
            let repeats = call % 4 == 3 && call > first + EARLIER;
            let asked = key(if repeats { call - EARLIER } else { call })?;
            let perform = async |conn: &mut PgConnection| -> Result<String, Error> {
                effect(conn).await?;
                Ok(response.to_owned())
            };
            let outcome = options.run(&pool, &asked, BODY, perform).await?;
            anyhow::ensure!(outcome.is_replayed() == repeats, "a repeat and nothing else is replayed");
            Ok(())
        })
    }))
}

async fn observe(conn: &mut PgConnection) -> anyhow::Result<BTreeMap<String, f64>> {
    // The last calls give their connections back to the pool meanwhile.
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
    let memory: f64 = memory.context("no VmRSS in /proc/self/status")?;
    let seen = [
        (MEMORY, memory / 1024.0),
        ("connections", connections as f64),
        (SIZE, table as f64 / f64::from(1 << 20)),
        ("records", records as f64),
    ];
    Ok(seen.map(|(name, value)| (name.to_owned(), rounded(value))).into())
}
