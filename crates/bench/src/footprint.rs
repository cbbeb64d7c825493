//! What one call costs whatever the machine: round trips, WAL, bytes on disk, allocations.

use std::time::Duration;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region};

use crate::bench::Bench;
use crate::client::{Client, next_call};
use crate::figures;
use crate::measure::median;
use crate::proxy::Proxy;
use crate::setting::Setting;
use crate::way::{Way, Work};

/// Of one unit: of each key in a batch. Round trips are PostgreSQL's and Redis's.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Footprint {
    #[serde(serialize_with = "figures::short")]
    pub(crate) round_trips: f64,
    #[serde(serialize_with = "figures::short")]
    pub(crate) wal_bytes: f64,
    #[serde(serialize_with = "figures::short_or_none")]
    pub(crate) heap_bytes: Option<f64>,
    #[serde(serialize_with = "figures::short_or_none")]
    pub(crate) index_bytes: Option<f64>,
    /// The share of updates that were heap-only.
    #[serde(serialize_with = "figures::short_or_none")]
    pub(crate) hot: Option<f64>,
    #[serde(serialize_with = "figures::short")]
    pub(crate) allocations: f64,
    #[serde(serialize_with = "figures::short")]
    pub(crate) allocated_bytes: f64,
}

/// The first calls prepare statements and fill caches; from the sixth on, plans are generic.
const WARM: usize = 8;
const TRIPS: usize = 10;
const ALLOCATING: usize = 100;
/// Units whose WAL is counted together; the median of these leaves out what the server writes by itself.
const TOGETHER: usize = 100;
const BATCHES: usize = 3;
const A_WHILE: Duration = Duration::from_millis(100);
const TELLING: usize = 100;

/// Of one alternative, by one client. A pool of its own is closed after that.
pub(crate) async fn footprint(
    bench: &Bench,
    counted: &(Setting, Proxy),
    way: &Way,
    units: usize,
) -> anyhow::Result<Option<Footprint>> {
    if matches!(way.work, Work::Pgbench { .. }) {
        return Ok(None);
    }
    let (setting, proxy) = counted;
    let mut observer = bench.plain().connect(None).await?;
    if let Some(table) = way.table {
        observer.execute(AssertSqlSafe(format!("truncate {table}"))).await?;
    }
    let before = written_at_rest(&mut observer, way).await?;
    let mut client = Client::connect(setting, None).await?;
    calls(way, &mut client, WARM).await?;

    proxy.take();
    let commands = |client: &Client| client.redis.as_ref().map_or(0, |redis| redis.commands);
    let before_trips = commands(&client);
    calls(way, &mut client, TRIPS).await?;
    // What the pool does beside a call may fall into the one before or after.
    let round_trips = ((proxy.take() + commands(&client) - before_trips) as f64 / TRIPS as f64).round();

    let region = Region::new(&INSTRUMENTED_SYSTEM);
    calls(way, &mut client, ALLOCATING).await?;
    let allocated = region.change();

    let together = (TOGETHER.min(units / BATCHES) / way.units).max(1);
    let batches = (units / (together * way.units)).max(BATCHES);
    let mut wal = Vec::new();
    for _ in 0..batches {
        let start = lsn(&mut observer).await?;
        calls(way, &mut client, together).await?;
        wal.push((lsn(&mut observer).await? - start) / together as f64);
    }
    let made = WARM + TRIPS + ALLOCATING + together * batches;
    // Connections tell what they have written when they end.
    drop(client);
    if let Some(pool) = &way.pool {
        pool.close().await;
    }

    let mut footprint = Footprint {
        round_trips,
        wal_bytes: median(wal),
        allocations: (allocated.allocations + allocated.reallocations) as f64 / ALLOCATING as f64,
        allocated_bytes: allocated.bytes_allocated as f64 / ALLOCATING as f64,
        ..Footprint::default()
    };
    if let Some(table) = way.table {
        let row = sqlx::query("select pg_table_size($1::text::regclass), pg_indexes_size($1::text::regclass)")
            .bind(table)
            .fetch_one(&mut observer)
            .await?;
        let per_call = |column| anyhow::Ok(row.try_get::<i64, _>(column)? as f64 / made as f64);
        footprint.heap_bytes = Some(per_call(0)?);
        footprint.index_bytes = Some(per_call(1)?);
        let after = written_with(&mut observer, way, before.inserts + (made * way.units) as i64).await?;
        let updates = after.updates - before.updates;
        footprint.hot = (updates > 0).then(|| (after.hot_updates - before.hot_updates) as f64 / updates as f64);
    }
    Ok(Some(footprint.for_each(way.units)))
}

impl Footprint {
    fn for_each(self, units: usize) -> Self {
        let each = |bytes: f64| bytes / units as f64;
        Self {
            round_trips: each(self.round_trips),
            wal_bytes: each(self.wal_bytes),
            heap_bytes: self.heap_bytes.map(each),
            index_bytes: self.index_bytes.map(each),
            hot: self.hot,
            allocations: each(self.allocations),
            allocated_bytes: each(self.allocated_bytes),
        }
    }
}

async fn calls(way: &Way, client: &mut Client, calls: usize) -> anyhow::Result<()> {
    for _ in 0..calls {
        way.call(client, next_call()).await?;
    }
    Ok(())
}

async fn lsn(conn: &mut PgConnection) -> anyhow::Result<f64> {
    let query = sqlx::query_scalar("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8");
    Ok(query.fetch_one(conn).await?)
}

#[derive(Clone, Copy, Default, PartialEq)]
struct Written {
    inserts: i64,
    updates: i64,
    hot_updates: i64,
}

/// What was written to the table since the server began, once those who wrote are gone.
async fn written_at_rest(conn: &mut PgConnection, way: &Way) -> anyhow::Result<Written> {
    let mut last = None;
    loop {
        let now = written(conn, way).await?;
        if last == Some(now) {
            return Ok(now);
        }
        last = Some(now);
        tokio::time::sleep(A_WHILE).await;
    }
}

/// The same, once the server has taken note of this many inserts.
async fn written_with(conn: &mut PgConnection, way: &Way, inserts: i64) -> anyhow::Result<Written> {
    for _ in 0..TELLING {
        let now = written(conn, way).await?;
        if now.inserts >= inserts {
            return Ok(now);
        }
        tokio::time::sleep(A_WHILE).await;
    }
    bail!("the server has not taken note of all that {} has written", way.name)
}

async fn written(conn: &mut PgConnection, way: &Way) -> anyhow::Result<Written> {
    let Some(table) = way.table else { return Ok(Written::default()) };
    let row = sqlx::query(
        "select n_tup_ins, n_tup_upd, n_tup_hot_upd from pg_stat_all_tables where relid = $1::text::regclass",
    )
    .bind(table)
    .fetch_one(conn)
    .await?;
    Ok(Written { inserts: row.try_get(0)?, updates: row.try_get(1)?, hot_updates: row.try_get(2)? })
}
