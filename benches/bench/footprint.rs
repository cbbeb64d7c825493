//! What one call costs whatever the machine: round trips, WAL, bytes on disk, allocations.

use serde::Serialize;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region};

use crate::bench::Bench;
use crate::client::{Client, next_call};
use crate::measure::median;
use crate::proxy::Proxy;
use crate::setting::Setting;
use crate::way::{Way, Work};

/// For each unit, that is: each key of a batch.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Footprint {
    pub(crate) round_trips: f64,
    pub(crate) wal_bytes: f64,
    pub(crate) heap_bytes: Option<f64>,
    pub(crate) index_bytes: Option<f64>,
    /// The share of updates that were heap-only.
    pub(crate) hot: Option<f64>,
    pub(crate) allocations: f64,
    pub(crate) allocated_bytes: f64,
}

/// The first calls prepare statements and fill caches; from the sixth on, plans are generic.
const WARM: usize = 8;
const TRIPS: usize = 10;
const ALLOCATING: usize = 100;
/// Units whose WAL is counted together; the median of these leaves out what the server writes by itself.
const TOGETHER: usize = 100;

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
    let before = updates(&mut observer, way).await?;
    let mut client = Client::connect(setting, None).await?;
    calls(way, &mut client, WARM).await?;

    proxy.take();
    calls(way, &mut client, TRIPS).await?;
    let round_trips = (proxy.take() as f64 / TRIPS as f64).round();

    let region = Region::new(&INSTRUMENTED_SYSTEM);
    calls(way, &mut client, ALLOCATING).await?;
    let allocated = region.change();

    let together = (TOGETHER / way.units).max(1);
    let batches = units / (together * way.units);
    let mut wal = Vec::new();
    for _ in 0..batches.max(3) {
        let start = lsn(&mut observer).await?;
        calls(way, &mut client, together).await?;
        wal.push((lsn(&mut observer).await? - start) / together as f64);
    }
    let made = WARM + TRIPS + ALLOCATING + together * batches.max(3);
    drop(client);

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
        let after = updates(&mut observer, way).await?;
        let updated = after.0 - before.0;
        footprint.hot = (updated > 0).then(|| (after.1 - before.1) as f64 / updated as f64);
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

/// Updates of the table, and how many of them were heap-only, once the server has taken note of all.
async fn updates(conn: &mut PgConnection, way: &Way) -> anyhow::Result<(i64, i64)> {
    let Some(table) = way.table else { return Ok((0, 0)) };
    let mut last = (-1, -1);
    loop {
        // A backend tells its counts when it ends, or a second later.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        let row =
            sqlx::query("select n_tup_upd, n_tup_hot_upd from pg_stat_all_tables where relid = $1::text::regclass")
                .bind(table)
                .fetch_one(&mut *conn)
                .await?;
        let now = (row.try_get(0)?, row.try_get(1)?);
        if now == last {
            return Ok(now);
        }
        last = now;
    }
}
