//! What a call costs as the table grows: databases of different sizes, in turns.

use sqlx::Executor as _;

use super::records::{store, stored_key};
use super::replay::select;
use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::response;
use crate::measure::compare;
use crate::results::Table;
use crate::way::Way;

pub(crate) const NAME: &str = "growth";

pub(crate) const FIRST_CALLS: &str = "First calls by the size of the table";
pub(crate) const REPLAYS: &str = "Replays of random keys by the size of the table";
pub(crate) const BARE_SELECTS: &str = "Bare selects of random keys by the size of the table";
const PARTITIONS: &str = include_str!("../../../../migrations/partitions.sql");

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let sizes = bench.scale.sizes;
    let mut databases: Vec<_> = sizes.iter().map(|size| (name(*size), format!("records_{size}"), *size)).collect();
    let partitioned = format!("{}, 16 partitions", name(sizes[1]));
    databases.insert(2, (partitioned.clone(), "partitioned".to_owned(), sizes[1]));
    for (name, database, records) in &databases {
        eprintln!("  storing {name} …");
        let mut conn = bench.create_database(database).await?;
        if *name == partitioned {
            conn.execute(sqlx::raw_sql(PARTITIONS)).await?;
        }
        store(&mut conn, *records, 1).await?;
    }
    let first = |_| library::first_call(response(300));
    let replay = |records| library::replay(move |call| stored_key(call, records));
    let select = |records| select(move |call| stored_key(call, records));
    let cases: [(_, _, &dyn Fn(u64) -> Way); 3] =
        [(FIRST_CALLS, "first calls", &first), (REPLAYS, "replays", &replay), (BARE_SELECTS, "selects", &select)];
    let mut tables = Vec::new();
    for (title, unit, way) in cases {
        let ways = databases.iter().map(|(name, database, records)| way(*records).on(database).named(name));
        let rows = compare(bench, bench.socket(), 8, &ways.collect::<Vec<_>>()).await?;
        tables.push(Table::new(title, "8 clients, Unix socket", unit, rows));
    }
    for (_, database, _) in &databases {
        bench.drop_database(database).await?;
    }
    Ok(tables)
}

pub(crate) fn name(records: u64) -> String {
    format!("{records} records")
}
