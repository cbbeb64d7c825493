//! Whether a call costs more than in the release before: `script/bench --guard`, in CI.
//!
//! The cost of a call is the processor time that this process and the server's backends need for it, and not its
//! duration, so that other work on the machine decides little. Each figure is the ratio to an alternative that takes
//! turns with it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::alternatives::{handler, library, usual};
use crate::bench::Bench;
use crate::cases::http;
use crate::client::{key, response};
use crate::measure::compare;
use crate::results::{Table, median, rounded};
use anyhow::{Context as _, ensure};

/// By release, and then by the name of the ratio.
type Kept = BTreeMap<String, BTreeMap<String, f64>>;

/// The ratios: the way, and what its cost is compared with. A greater ratio is a cheaper call.
const RATIOS: [(&str, &str); 4] = [
    (library::NAME, usual::NAME),
    (library::BY_RUN, library::FROM_POOL),
    (http::FIRST_CALL, handler::NAME),
    (http::REPLAY, http::BY_HAND_REPLAY),
];
const MEASUREMENTS: usize = 3;
/// A measurement below this part of the kept ratio is too slow. Two of the three have to be.
const TOO_SLOW: f64 = 0.9;

/// Measures, and compares with the figures of the newest release. With `keep`, stores the figures as those of this
/// release.
pub(crate) async fn run(bench: &Bench, keep: bool) -> anyhow::Result<()> {
    if !Path::new("/proc/self/stat").exists() {
        println!("skipped: this system has no /proc, which tells the processor time of the server");
        return Ok(());
    }
    let mut kept: Kept = serde_json::from_str(&fs::read_to_string(file())?)?;
    let before = kept.last_key_value().map(|(_, ratios)| ratios.clone()).unwrap_or_default();
    ensure!(keep || !before.is_empty(), "no release is kept; run script/bench --keep");
    let mut measured = Vec::new();
    for _ in 0..MEASUREMENTS {
        let table = measure(bench).await?;
        let ratio = |(way, other): (&str, &str)| table.rate_over(way, other).context("both were measured");
        measured.push(RATIOS.into_iter().map(ratio).collect::<anyhow::Result<Vec<_>>>()?);
    }
    let mut slower = Vec::new();
    let mut now = BTreeMap::new();
    for (at, (way, other)) in RATIOS.into_iter().enumerate() {
        let name = format!("{way} over {other}");
        let ratios: Vec<f64> = measured.iter().map(|ratios| rounded(ratios[at])).collect();
        let wanted = before.get(&name).copied();
        println!("{name}: {ratios:?}, kept: {wanted:?}");
        let too_slow = |ratio: &&f64| wanted.is_some_and(|wanted| **ratio < wanted * TOO_SLOW);
        if ratios.iter().filter(too_slow).count() * 2 > MEASUREMENTS {
            slower.push(name.clone());
        }
        now.insert(name, rounded(median(ratios)));
    }
    if keep {
        kept.insert(env!("CARGO_PKG_VERSION").to_owned(), now);
        fs::write(file(), serde_json::to_string_pretty(&kept)? + "\n")?;
        return Ok(());
    }
    ensure!(slower.is_empty(), "slower than in the release before: {}", slower.join("; "));
    Ok(())
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/performance/releases.json")
}

async fn measure(bench: &Bench) -> anyhow::Result<Table> {
    bench.clear().await?;
    let response = response(300);
    let mut ways = vec![usual::first_call(key, response)];
    let variants = [library::NAME, library::FROM_POOL, library::BY_RUN];
    let variants = library::VARIANTS.iter().filter(|variant| variants.contains(&variant.name));
    ways.extend(variants.map(|variant| variant.first_call(key, response)));
    let mut rows = compare(bench, bench.plain(), 8, &ways).await?;
    // Afterwards, because the ways above empty the table of the record that is replayed.
    rows.extend(compare(bench, bench.plain(), 8, &http::beside_by_hand(bench.plain()).await?).await?);
    Ok(Table::new("", "", "", rows))
}
