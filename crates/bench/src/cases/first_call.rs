//! A key that nobody has used: claim, business, completion, commit.

use std::sync::Arc;

use crate::alternatives::{BARE, by_hand, first_calls, first_calls_on_postgres, library, usual};
use crate::bench::Bench;
use crate::client::{of_clients, response};
use crate::footprint::footprint;
use crate::measure::{Measured, interleave, named};
use crate::report::Report;
use crate::setting::Setting;
use crate::target::Bound::{AtLeast, AtMost, Told};

pub(crate) const ABOUT: &str = "\
Each call inserts one business row in a transaction, and returns a response. *The same SQL by hand* sends the crate's \
statements through sqlx. *Usual hand-written code* is insert, catch the unique violation, select, update. It has no \
retention, no fence and no wait with a limit. *Redis around it* is GET, SET NX PX, the transaction, SET, and a script that \
releases the lock. Its Redis writes nothing to disk. If a process dies between COMMIT and SET, the business row is inserted \
twice. *pgbench* sends the crate's statements, but does not hash a key, compute a fingerprint or encode a response. *By run* \
uses a pool of two connections for each client, without sqlx's ping before the pool lends one. Its round trips include some \
for which no call waits: the ping when a connection comes back, and a ROLLBACK after the commit of the fewest round trips.";

const NAME: &str = "first_call";
const SIZES: [(usize, &str); 3] = [(300, "300 B"), (4096, "4 KB"), (256 * 1024, "256 KB")];
/// Of clients; what is promised is promised of 8.
const CLIENTS: [usize; 3] = [8, 1, 32];

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    for setting in bench.settings() {
        for (at, (bytes, size)) in SIZES.into_iter().enumerate() {
            let response: Arc<str> = response(bytes).into();
            // Other sizes and other numbers of clients, but not both; and over the network neither.
            let clients = if at == 0 && setting.rtt.is_none() { &CLIENTS[..] } else { &CLIENTS[..1] };
            if at > 0 && setting.rtt.is_some() {
                continue;
            }
            for &clients in clients {
                bench.clear().await?;
                let ways =
                    if at == 0 { first_calls(bench, &response) } else { first_calls_on_postgres(bench, &response) };
                let measured = interleave(bench, setting, clients, ways).await?;
                let told = setting.told();
                let title = format!("{size} of response, {}", of_clients(clients));
                report.speeds(NAME, title, told, "calls", &measured);
                if at > 0 || clients != CLIENTS[0] {
                    continue;
                }
                let of = |name| Some(named(&measured, library::NAME)?.against(named(&measured, name)?));
                let [to_hand, to_usual, to_bare] = [by_hand::NAME, usual::NAME, BARE].map(of);
                report.target(NAME, "First call: rate over that of the same SQL by hand", told, AtLeast(0.95), to_hand);
                report.target(
                    NAME,
                    "First call: rate over that of the usual hand-written code",
                    told,
                    AtLeast(1.0),
                    to_usual,
                );
                report.target(NAME, "First call: rate over that of the bare transaction", told, Told, to_bare);
                of_variants(report, setting, &measured);
            }
        }
    }
    bench.clear().await?;
    costs(bench, report).await
}

/// What each way of the crate's own is for: over a network it saves time, and without one it costs none.
fn of_variants(report: &mut Report, setting: &Setting, measured: &[Measured]) {
    let of = |name| named(measured, name);
    for variant in library::VARIANTS {
        let wanted = variant.first_call.map_or(Told, AtMost);
        if setting.rtt.is_some() {
            let times = of(variant.name).zip(of(BARE)).map(|(variant, bare)| variant.slower(bare));
            report.target(
                NAME,
                format!("First call, {}: p50 over that of the bare transaction", variant.name),
                setting.told(),
                wanted,
                times,
            );
        } else if let Some(plain) = variant.plain() {
            let ratio = of(variant.name).zip(of(plain)).map(|(variant, plain)| variant.against(plain));
            // The one that looks first is for replays, and looks in vain here.
            let wanted = if variant.is_for_replays() { Told } else { AtLeast(0.95) };
            let what = format!("First call, {}: rate over that of {plain}", variant.name);
            report.target(NAME, what, setting.told(), wanted, ratio);
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
    report.target(NAME, "First call: round trips more than the bare transaction", None, AtMost(2.0), trips);
    report.target(NAME, "First call: bytes of WAL more than the bare transaction", None, AtMost(950.0), wal);
    report.footprints(NAME, "call", costs);
    Ok(())
}
