//! A key that nobody has used: claim, business, completion, commit.

use crate::alternatives::{bare_call, by_hand, library, redis, usual};
use crate::bench::Bench;
use crate::client::{key, key_of_one_scope, of_clients, response};
use crate::footprint::footprints;
use crate::measure::compare;
use crate::results::{MAIN, Table};
use crate::way::Way;

pub(crate) const NAME: &str = "first_call";

pub(crate) const OF_ONE_SCOPE: &str = "First calls of one scope, 8 clients";
pub(crate) const BY_CLIENTS: &str = "First calls by the number of clients, 300 B of response, Unix socket";
pub(crate) const BY_SIZE: &str = "First calls by the size of the response, 8 clients, Unix socket";
pub(crate) const CLIENTS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const SIZES: [(usize, &str); 4] = [(300, "300 B"), (4 << 10, "4 KB"), (64 << 10, "64 KB"), (256 << 10, "256 KB")];

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    let every = every_way(bench)?;
    for setting in bench.settings() {
        bench.clear().await?;
        let rows = compare(bench, setting, 8, &every).await?;
        tables.push(Table::new(MAIN, setting.column(), "calls", rows));
    }
    for setting in bench.settings() {
        bench.clear().await?;
        let response = response(SIZES[0].0);
        let plain = &library::VARIANTS[0];
        let ways = [usual::first_call(key_of_one_scope, response), plain.first_call(key_of_one_scope, response)];
        let rows = compare(bench, setting, 8, &ways).await?;
        tables.push(Table::new(OF_ONE_SCOPE, setting.column(), "calls", rows));
    }
    for clients in CLIENTS {
        bench.clear().await?;
        let rows = compare(bench, bench.socket(), clients, &some_ways(SIZES[0].0)).await?;
        tables.push(Table::new(BY_CLIENTS, of_clients(clients), "calls", rows));
    }
    for (bytes, size) in SIZES {
        bench.clear().await?;
        let rows = compare(bench, bench.socket(), 8, &some_ways(bytes)).await?;
        tables.push(Table::new(BY_SIZE, size, "calls", rows));
    }
    bench.clear().await?;
    tables.push(footprints(bench, bench.counted().await?, "call", &every).await?);
    Ok(tables)
}

fn every_way(bench: &Bench) -> anyhow::Result<Vec<Way>> {
    let response = response(SIZES[0].0);
    let unguarded = bench.by_hand.unguarded()?.first_call(response).named(by_hand::UNGUARDED);
    let mut ways = vec![bare_call(), bench.by_hand.first_call(response), unguarded, usual::first_call(key, response)];
    ways.extend(library::VARIANTS.iter().map(|variant| variant.first_call(key, response)));
    ways.extend(bench.redis.iter().map(|_| redis::first_call(response)));
    Ok(ways)
}

/// The ways that have a curve.
fn some_ways(bytes: usize) -> Vec<Way> {
    let response = response(bytes);
    vec![bare_call(), usual::first_call(key, response), library::first_call(response)]
}
