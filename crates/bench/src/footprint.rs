//! What one call costs, whatever the machine: round trips, WAL, and bytes on disk.

use std::collections::BTreeMap;

use rig::proxy::Proxy;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection};

use crate::bench::Bench;
use crate::client::{Client, next_call};
use crate::results::{Row, Table, median, rounded};
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const ROUND_TRIPS: &str = "round trips";
pub(crate) const WAL: &str = "WAL, B";
pub(crate) const HEAP: &str = "heap, B";
pub(crate) const INDEX: &str = "index, B";

/// The first calls prepare statements and fill caches; from the sixth on, plans are generic.
const WARM: usize = 8;
const TRIPS: usize = 10;
/// The WAL of this many units is counted together. The median of such batches leaves out what the server writes by
/// itself.
const TOGETHER: usize = 100;
const BATCHES: usize = 3;

/// A table of what one unit of each way costs. One client makes the calls, through a proxy that counts round trips.
pub(crate) async fn footprints(
    bench: &Bench,
    counted: (Setting, Proxy),
    unit: &str,
    ways: &[Way],
) -> anyhow::Result<Table> {
    let mut rows = Vec::new();
    for way in ways {
        rows.push(Row { way: way.name.clone(), speed: None, costs: footprint(bench, &counted, way).await? });
    }
    Ok(Table::new(title(unit), "", "", rows))
}

pub(crate) fn title(unit: &str) -> String {
    format!("What one {unit} takes")
}

async fn footprint(bench: &Bench, counted: &(Setting, Proxy), way: &Way) -> anyhow::Result<BTreeMap<String, f64>> {
    let (setting, proxy) = counted;
    let mut observer = bench.plain().connect(None).await?;
    if let Some(table) = way.table {
        observer.execute(AssertSqlSafe(format!("truncate {table}"))).await?;
    }
    let mut client = Client::connect(setting, None).await?;
    calls(way, &mut client, WARM).await?;

    proxy.take();
    let commands = |client: &Client| client.redis.as_ref().map_or(0, |redis| redis.commands);
    let before = commands(&client);
    calls(way, &mut client, TRIPS).await?;
    // What the pool does beside a call may fall into the one before or after.
    let round_trips = ((proxy.take() + commands(&client) - before) as f64 / TRIPS as f64).round();

    let units = bench.scale.counted;
    let together = (TOGETHER.min(units / BATCHES) / way.units).max(1);
    let batches = (units / (together * way.units)).max(BATCHES);
    let mut wal = Vec::new();
    for _ in 0..batches {
        let start = lsn(&mut observer).await?;
        calls(way, &mut client, together).await?;
        wal.push((lsn(&mut observer).await? - start) / together as f64);
    }
    let mut costs = BTreeMap::from([(ROUND_TRIPS.to_owned(), round_trips), (WAL.to_owned(), median(wal))]);
    if let Some(table) = way.table {
        let made = (WARM + TRIPS + together * batches) as f64;
        let sizes = sqlx::query_as("select pg_table_size($1::text::regclass), pg_indexes_size($1::text::regclass)");
        let (heap, indexes): (i64, i64) = sizes.bind(table).fetch_one(&mut observer).await?;
        costs.extend([(HEAP.to_owned(), heap as f64 / made), (INDEX.to_owned(), indexes as f64 / made)]);
    }
    costs.values_mut().for_each(|cost| *cost = rounded(*cost / way.units as f64));
    Ok(costs)
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
