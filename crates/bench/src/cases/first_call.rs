//! A key that nobody has used: claim, business, completion, commit.

use std::sync::Arc;

use crate::alternatives::{bare_call, library, redis, usual};
use crate::bench::Bench;
use crate::client::{of_clients, response};
use crate::footprint::footprints;
use crate::measure::compare;
use crate::results::{MAIN, Table};
use crate::way::Way;

pub(crate) const NAME: &str = "first_call";
pub(crate) const MEASURES: &str = "\
Each call inserts one business row in a transaction, and returns a response. Each alternative begins its turn with an \
empty table of keys; the section on growth has larger ones. *The same SQL by hand* sends the crate's statements \
through sqlx. *Usual hand-written code* is insert, catch the unique violation, select, update. It has no \
retention, no fence and no wait with a limit. *Redis around it* is GET, SET NX PX, the transaction, SET, and a script \
that releases the lock. Its Redis writes nothing to disk. If a process dies between COMMIT and SET, the business row is \
inserted twice. *pg-idempotency* is called in a transaction of the caller, like the hand-written code. *Begun from the \
pool* is the same call in a transaction that the caller begins from the client's pool. In the other lines the crate \
begins and commits; its BEGIN checks that nobody else has begun a transaction. *By run* and *fewest round trips* use a \
pool of two connections for each client, without sqlx's ping before the pool lends one. Their round trips include some \
for which no call waits: the ping when a connection comes back, and a ROLLBACK after the commit of the fewest round \
trips.";

pub(crate) const BY_CLIENTS: &str = "First calls by the number of clients, 300 B of response, Unix socket";
pub(crate) const BY_SIZE: &str = "First calls by the size of the response, 8 clients, Unix socket";
pub(crate) const CLIENTS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const SIZES: [(usize, &str); 4] = [(300, "300 B"), (4 << 10, "4 KB"), (64 << 10, "64 KB"), (256 << 10, "256 KB")];

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    let every = every_way(bench);
    for setting in bench.settings() {
        bench.clear().await?;
        let rows = compare(bench, setting, 8, &every).await?;
        tables.push(Table::new(NAME, MAIN, setting.column(), "calls", rows));
    }
    for clients in CLIENTS {
        bench.clear().await?;
        let rows = compare(bench, bench.socket(), clients, &some_ways(SIZES[0].0)).await?;
        tables.push(Table::new(NAME, BY_CLIENTS, of_clients(clients), "calls", rows));
    }
    for (bytes, size) in SIZES {
        bench.clear().await?;
        let rows = compare(bench, bench.socket(), 8, &some_ways(bytes)).await?;
        tables.push(Table::new(NAME, BY_SIZE, size, "calls", rows));
    }
    bench.clear().await?;
    tables.push(footprints(bench, bench.counted()?, NAME, "call", &every).await?);
    Ok(tables)
}

fn every_way(bench: &Bench) -> Vec<Way> {
    let response: Arc<str> = response(SIZES[0].0).into();
    let mut ways = vec![bare_call(), bench.by_hand.first_call(response.clone()), usual::first_call(response.clone())];
    ways.extend(library::VARIANTS.iter().map(|variant| variant.first_call(response.clone())));
    ways.extend(bench.redis.iter().map(|_| redis::first_call(response.clone())));
    ways
}

/// The ways that have a curve.
fn some_ways(bytes: usize) -> Vec<Way> {
    let response: Arc<str> = response(bytes).into();
    let mut ways = vec![bare_call(), usual::first_call(response.clone())];
    let variants = library::VARIANTS.iter().filter(|variant| [library::NAME, library::FEWEST].contains(&variant.name));
    ways.extend(variants.map(|variant| variant.first_call(response.clone())));
    ways
}
