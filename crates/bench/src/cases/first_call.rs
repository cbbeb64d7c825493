//! A key that nobody has used: claim, business, completion, commit.

use std::sync::Arc;

use crate::alternatives::{BARE, by_hand, first_calls, first_calls_on_postgres, library, usual};
use crate::bench::Bench;
use crate::client::{of_clients, response};
use crate::footprint::footprint;
use crate::measure::{Measured, interleave_from_empty, named};
use crate::report::Report;
use crate::setting::Setting;

pub(crate) const ABOUT: &str = "\
Each call inserts one business row in a transaction, and returns a response. Each alternative begins its turn with an \
empty table of keys; the section on growth has larger ones. *The same SQL by hand* sends the crate's statements \
through sqlx. *Usual hand-written code* is insert, catch the unique violation, select, update. It has no \
retention, no fence and no wait with a limit. *Redis around it* is GET, SET NX PX, the transaction, SET, and a script that \
releases the lock. Its Redis writes nothing to disk. If a process dies between COMMIT and SET, the business row is inserted \
twice. *pg-idempotency* is called in a transaction of the caller, like the hand-written code. *Begun from the pool* is the same call in a transaction that the caller begins from the client's \
pool. In the other lines the crate begins and commits; its BEGIN checks that nobody else has begun a transaction. *pgbench* sends the crate's statements, \
but does not hash a key, compute a fingerprint or encode a response. *By run* and *fewest round trips* use a pool of \
two connections for each client, without sqlx's ping before the pool lends one. Their round trips include some for \
which no call waits: the ping when a connection comes back, and a ROLLBACK after the commit of the fewest round trips.";

const NAME: &str = "first_call";
/// In the names of figures.
const FEWEST: &str = "fewest round trips";
pub(crate) const SIZES: [(usize, &str); 3] = [(300, "300 B"), (4096, "4 KB"), (256 * 1024, "256 KB")];
/// Of clients; the targets are for the first.
pub(crate) const CLIENTS: [usize; 3] = [8, 1, 32];

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    for setting in bench.settings().chain(bench.farther()) {
        // Other sizes and other numbers of clients, but not both; and over the network neither.
        let other = if setting.rtt.is_none() { usize::MAX } else { 1 };
        for (at, (bytes, size)) in SIZES.into_iter().enumerate().take(other) {
            let response: Arc<str> = response(bytes).into();
            let clients = if at == 0 { &CLIENTS[..CLIENTS.len().min(other)] } else { &CLIENTS[..1] };
            for &clients in clients {
                bench.clear().await?;
                let ways =
                    if at == 0 { first_calls(bench, &response) } else { first_calls_on_postgres(bench, &response) };
                let measured = interleave_from_empty(bench, setting, clients, ways).await?;
                report.speeds(NAME, title(size, clients), setting.told(), "calls", &measured);
                if clients == CLIENTS[0] {
                    ratios(report, setting, size, &measured);
                }
            }
        }
    }
    bench.clear().await?;
    costs(bench, report).await
}

/// Of a section.
pub(crate) fn title(size: &str, clients: usize) -> String {
    format!("{size} of response, {}", of_clients(clients))
}

fn ratios(report: &mut Report, setting: &Setting, size: &str, measured: &[Measured]) {
    let of = |name| named(measured, name);
    let mut ratio = |name: &str, way, other, label: &str| {
        let ratio = of(way).zip(of(other)).map(|(way, other): (&Measured, &Measured)| way.against(other));
        report.figure(NAME, format!("First call, {name}: rate over that of {label}"), setting.told(), ratio);
    };
    ratio(size, library::NAME, usual::NAME, usual::NAME);
    if size != SIZES[0].1 {
        return;
    }
    ratio(FEWEST, library::FEWEST, usual::NAME, usual::NAME);
    ratio(size, library::NAME, by_hand::NAME, by_hand::NAME);
    ratio(size, library::NAME, BARE, "the bare transaction");
    let by_run =
        of(library::BY_RUN).zip(of(library::FROM_POOL)).map(|(way, other): (&Measured, &Measured)| way.against(other));
    ratio(FEWEST, library::FEWEST, BARE, "the bare transaction");
    let what = "First call, by run: rate over that in a transaction from the same pool";
    report.figure(NAME, what, setting.told(), by_run);
    if setting.rtt.is_some() {
        for (name, way) in [(size, library::NAME), (FEWEST, library::FEWEST)] {
            let times = of(way).zip(of(BARE)).map(|(way, bare)| way.slower(bare));
            report.figure(
                NAME,
                format!("First call, {name}: p50 over that of the bare transaction"),
                setting.told(),
                times,
            );
        }
    }
}

async fn costs(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let counted = bench.counted()?;
    let mut costs = Vec::new();
    for way in first_calls(bench, &response(SIZES[0].0).into()) {
        costs.push((way.name.clone(), footprint(bench, &counted, &way, bench.scale.counted).await?));
    }
    let over_bare = |of: fn(crate::footprint::Footprint) -> f64| {
        let cost = |name| costs.iter().find(|(way, _)| way == name).and_then(|(_, cost)| *cost).map(of);
        Some(cost(library::NAME)? - cost(BARE)?)
    };
    let trips = over_bare(|cost| cost.round_trips);
    let wal = over_bare(|cost| cost.wal_bytes);
    report.figure(NAME, "First call: round trips more than the bare transaction", None, trips);
    report.figure(NAME, "First call: bytes of WAL more than the bare transaction", None, wal);
    report.footprints(NAME, "call", costs);
    Ok(())
}
