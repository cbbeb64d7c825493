//! Whether a call costs more than in the release before: `script/bench --guard`, in CI.
//!
//! The cost of a call is the processor time that this process and the server's backends need for it, and not its duration,
//! so that other work on the machine decides little. Each figure is the ratio to an alternative that takes turns with it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use sqlx::PgConnection;

use crate::alternatives::{handler, library, usual};
use crate::bench::Bench;
use crate::cases::http;
use crate::client::response;
use crate::measure::compare;
use crate::results::{Table, median, rounded};

/// By release, and then by the name of the ratio.
type Kept = BTreeMap<String, BTreeMap<String, f64>>;

/// The ratios: the way, and what its cost is compared with. A greater ratio is a cheaper call.
const RATIOS: [(&str, &str); 4] = [
    (library::NAME, usual::NAME),
    (library::BY_RUN, library::FROM_POOL),
    (http::FIRST_CALL, handler::NAME),
    (http::REPLAY, http::BY_HAND_REPLAY),
];
const ROUNDS: usize = 3;
/// A round below this part of the kept ratio is too slow. Two of the three rounds have to be.
const TOO_SLOW: f64 = 0.9;

/// Measures, and compares with the figures of the newest release. With `keep`, stores the figures as those of this release.
pub(crate) async fn run(bench: &Bench, keep: bool) -> anyhow::Result<()> {
    if !Path::new("/proc/self/stat").exists() {
        println!("skipped: this system has no /proc, which tells the processor time of the server");
        return Ok(());
    }
    let mut kept: Kept = serde_json::from_str(&fs::read_to_string(file())?)?;
    let before = kept.last_key_value().map(|(_, ratios)| ratios.clone()).unwrap_or_default();
    ensure!(keep || !before.is_empty(), "no release is kept; run script/bench --keep");
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let table = measure(bench).await?;
        let ratio = |(way, other): (&str, &str)| table.rate_over(way, other).context("both were measured");
        rounds.push(RATIOS.into_iter().map(ratio).collect::<anyhow::Result<Vec<_>>>()?);
    }
    let mut slower = Vec::new();
    let mut now = BTreeMap::new();
    for (at, (way, other)) in RATIOS.into_iter().enumerate() {
        let name = format!("{way} over {other}");
        let of_rounds: Vec<f64> = rounds.iter().map(|round| rounded(round[at])).collect();
        let wanted = before.get(&name).copied();
        println!("{name}: {of_rounds:?}, kept: {wanted:?}");
        let too_slow = |ratio: &&f64| wanted.is_some_and(|wanted| **ratio < wanted * TOO_SLOW);
        if of_rounds.iter().filter(too_slow).count() * 2 > ROUNDS {
            slower.push(name.clone());
        }
        now.insert(name, rounded(median(of_rounds)));
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
    let mut ways = vec![usual::first_call(response)];
    let variants = [library::NAME, library::FROM_POOL, library::BY_RUN];
    let variants = library::VARIANTS.iter().filter(|variant| variants.contains(&variant.name));
    ways.extend(variants.map(|variant| variant.first_call(response)));
    let mut rows = compare(bench, bench.plain(), 8, &ways).await?;
    // Afterwards, because the ways above empty the table of the record that is replayed.
    rows.extend(compare(bench, bench.plain(), 8, &http::beside_by_hand(bench.plain()).await?).await?);
    Ok(Table::new("", "", "", rows))
}

/// The processor time of this process and of the server's, in seconds.
pub(crate) fn processor_time(postmaster: i32) -> anyhow::Result<f64> {
    let mut ticks = of("self", |_| true)?.unwrap_or_default();
    for process in fs::read_dir("/proc")? {
        let name = process?.file_name();
        let Some(name) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else { continue };
        // A backend may end at this moment.
        ticks += of(name, |parent| parent == postmaster).unwrap_or_default().unwrap_or_default();
    }
    // Linux counts in hundredths of a second everywhere.
    Ok(ticks as f64 / 100.0)
}

/// The ticks of a process and of its children that have ended, if its parent is the right one.
fn of(process: &str, wanted: impl Fn(i32) -> bool) -> anyhow::Result<Option<u64>> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name of the program may contain spaces and brackets.
    let fields: Vec<&str> = stat.rsplit_once(')').context("a stat has a name")?.1.split_whitespace().collect();
    let field = |at: usize| fields.get(at).context("a stat has fields");
    if !wanted(field(1)?.parse()?) {
        return Ok(None);
    }
    Ok(Some(field(11)?.parse::<u64>()? + field(12)?.parse::<u64>()?))
}

/// The process that is the parent of all backends.
pub(crate) async fn postmaster(conn: &mut PgConnection) -> anyhow::Result<i32> {
    let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(conn).await?;
    let stat = fs::read_to_string(format!("/proc/{backend}/stat"))?;
    let fields = stat.rsplit_once(')').context("a stat has a name")?.1;
    Ok(fields.split_whitespace().nth(1).context("a stat has fields")?.parse()?)
}
