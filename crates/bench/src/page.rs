//! The page for readers, docs/performance.md: its text is in `performance.template` beside this file, and each figure
//! in it is computed here.

use std::fmt::Write as _;

use anyhow::bail;

use crate::alternatives::{BARE, by_hand, handler, library, redis, usual};
use crate::cases::{
    first_call, growth, http, janitor, lease, marks, memory, night, protect, replay, soak, storm, storm_adds,
};
use crate::figures::cell;
use crate::footprint::{self, HEAP, INDEX, WAL};
use crate::results::{MAIN, NOT_DURABLE, ONE_MILLISECOND, Results, SOCKET, Table, figure, median};
use crate::template::filled;

const TEMPLATE: &str = include_str!("performance.template");

/// The rate of a `way` over that of the code that a service would have without the crate, or of the same code without
/// one part.
pub(crate) struct Ratio {
    pub(crate) case: &'static str,
    pub(crate) way: &'static str,
    pub(crate) other: &'static str,
    pub(crate) what: &'static str,
    pub(crate) compared: &'static str,
}

pub(crate) const RATIOS: [Ratio; 7] = [
    Ratio {
        case: first_call::NAME,
        way: library::NAME,
        other: usual::NAME,
        what: "first call",
        compared: "the usual hand-written code",
    },
    Ratio {
        case: first_call::NAME,
        way: by_hand::UNGUARDED,
        other: usual::NAME,
        what: "first call without its guards",
        compared: "the usual hand-written code",
    },
    Ratio {
        case: first_call::NAME,
        way: library::BY_RUN,
        other: library::FROM_POOL,
        what: "first call by `run`",
        compared: "a call that begins and commits",
    },
    Ratio {
        case: http::NAME,
        way: http::FIRST_CALL,
        other: handler::NAME,
        what: "first request, HTTP layer",
        compared: "a hand-made handler",
    },
    Ratio {
        case: http::NAME,
        way: http::REPLAY,
        other: http::BY_HAND_REPLAY,
        what: "replay, HTTP layer",
        compared: "its replay",
    },
    Ratio {
        case: http::NAME,
        way: http::REPLAY_FIRST,
        other: http::BY_HAND_REPLAY,
        what: "replay, HTTP layer, with replay_first",
        compared: "its replay",
    },
    Ratio {
        case: protect::NAME,
        way: by_hand::NAME,
        other: protect::WITHOUT,
        what: "claim with its token",
        compared: "a claim that leaves no token",
    },
];

pub(crate) fn page(results: &Results) -> anyhow::Result<String> {
    filled(TEMPLATE, |name| value(name, results))
}

/// The text for a placeholder.
fn value(name: &str, results: &Results) -> anyhow::Result<String> {
    let main = |case, column| results.find(case, MAIN, column);
    let on_socket = |case| main(case, SOCKET);
    let ratio =
        |table: Option<&Table>, way: &str, other: &str| table.and_then(|table| table.rate_over(way, other)).map(figure);
    let text = match name {
        "runs" => Some(runs(results)),
        "summary" => Some(summary(results)),
        "comparison" => Some(comparison(results)),
        "costs" => Some(costs(results)),
        "first call added" => added(results, first_call::NAME, BARE, library::NAME),
        "http added" => added(results, http::NAME, http::BARE, http::FIRST_CALL),
        "heap of a bare request" => heap(results, memory::BARE),
        "heap of a leased request" => heap(results, memory::LEASED),
        "heap of a waiting request" => heap(results, memory::QUEUED),
        "lease added" => added(results, lease::NAME, lease::BARE, library::NAME),
        "grown first calls" => grown(results, growth::FIRST_CALLS),
        "grown replays" => grown(results, growth::REPLAYS),
        "grown selects" => grown(results, growth::BARE_SELECTS),
        "storm" => {
            let storms = [results.titled(storm::NAME, storm::TITLE), results.titled(http::NAME, http::STORM)].concat();
            storms.iter().filter_map(|table| storm_adds(table, results)).reduce(f64::max).map(figure)
        }
        "marks" => ratio(results.find(marks::NAME, marks::TITLE, SOCKET), &marks::name(100), &marks::name(1)),
        "trigger" => {
            let inserts = results.find(protect::NAME, protect::STATEMENTS, NOT_DURABLE);
            let added = inserts.and_then(|table| Some(table.p50(protect::GUARDED)? - table.p50(protect::UNGUARDED)?));
            added.map(|ms| figure(ms * 1e3))
        }
        "beside a sweep" => ratio(on_socket(janitor::NAME), janitor::BESIDE, janitor::WITHOUT),
        "swept" => {
            let sweeps = results.find(janitor::NAME, janitor::SWEEPS, SOCKET);
            sweeps.and_then(|table| table.speed(janitor::UNPACED)).map(|speed| figure(speed.rate()))
        }
        "after a night" => after(results, night::EXPIRED),
        "after a small analyze" => after(results, night::SMALL),
        "soak p99" => soaked(results, |table, minute| Some(table.speed(minute)?.p99_ms)),
        "soak memory" => soaked(results, |table, minute| table.cost(minute, soak::MEMORY)),
        _ => bail!("nothing is known about the placeholder {name}"),
    };
    Ok(text.unwrap_or_else(|| "(not measured yet)".to_owned()))
}

/// The rate of first calls whose plans were made on these records, over that on live records.
fn after(results: &Results, records: &str) -> Option<String> {
    results.find(night::NAME, night::TITLE, NOT_DURABLE)?.rate_over(records, night::LIVE).map(figure)
}

fn runs(results: &Results) -> String {
    let of_run = |run: &crate::results::Run| {
        format!("- `{}`: {}, {:.0} min, {} cores for clients and server.", run.command, run.day, run.minutes, run.cores)
    };
    results.runs.iter().map(of_run).collect::<Vec<_>>().join("\n")
}

fn summary(results: &Results) -> String {
    let columns = [SOCKET, NOT_DURABLE, ONE_MILLISECOND];
    let heads: String = columns.iter().map(|column| cell(column)).collect();
    let mut text = format!("| rate of a | over that of |{heads}\n|---|---|{}\n", "--:|".repeat(columns.len()));
    for Ratio { case, way, other, what, compared } in RATIOS {
        let ratio = |column: &&str| results.find(case, MAIN, column)?.rate_over(way, other).map(figure);
        let cells: String = columns.iter().map(|column| cell(&ratio(column).unwrap_or_default())).collect();
        let _ = writeln!(text, "| {what} | {compared} |{cells}");
    }
    text.trim_end().to_owned()
}

/// The tables whose commits wait for the disk.
fn durable<'r>(results: &'r Results, case: &str, title: &str) -> Vec<&'r Table> {
    results.titled(case, title).into_iter().filter(|table| table.column != NOT_DURABLE).collect()
}

/// By how much the median time of this way is above that of the bare one.
fn added(results: &Results, case: &str, bare: &str, way: &str) -> Option<String> {
    let of_table = |table: &Table| {
        let added = figure(table.p50(way)? - table.p50(bare)?);
        let place = if table.column == SOCKET { "on a" } else { "at" };
        Some(format!("{added} ms {place} {}", table.column))
    };
    let added: Vec<_> = durable(results, case, MAIN).into_iter().filter_map(of_table).collect();
    (!added.is_empty()).then(|| added.join(", "))
}

/// The kilobytes of the heap that one request takes.
fn heap(results: &Results, request: &str) -> Option<String> {
    results.find(memory::NAME, memory::TITLE, "")?.cost(request, memory::BYTES).map(|bytes| figure(bytes / 1e3))
}

/// The ratio of the medians of the largest and the smallest table.
fn grown(results: &Results, title: &str) -> Option<String> {
    let table = *results.titled(growth::NAME, title).first()?;
    table.p50_over(&growth::name(10_000_000), &growth::name(10_000)).map(figure)
}

/// The median of the last ten minutes over that of the first ten.
fn soaked(results: &Results, of: fn(&Table, &str) -> Option<f64>) -> Option<String> {
    let table = *results.titled(soak::NAME, soak::MINUTES).first()?;
    let minutes: Vec<_> = table.rows.iter().filter_map(|row| of(table, &row.way)).collect();
    let (first, last) = (minutes.first_chunk::<10>()?, minutes.last_chunk::<10>()?);
    Some(figure(median(last.to_vec()) / median(first.to_vec())))
}

/// What each alternative costs and promises.
fn comparison(results: &Results) -> String {
    let crashes = [
        (BARE, "two"),
        (usual::NAME, "one"),
        (redis::NAME, "**two**, when the lock has expired"),
        (library::NAME, "one"),
        (library::REPLAY_FIRST, "one"),
    ];
    let mut columns = Vec::new();
    for (case, what) in [(first_call::NAME, "first calls"), (replay::NAME, "replays")] {
        for place in [SOCKET, ONE_MILLISECOND] {
            columns.push((format!("{what} a second, {place}"), results.find(case, MAIN, place)));
        }
    }
    let heads: String = columns.iter().map(|(head, _)| cell(head)).collect();
    let mut text =
        format!("| |{heads} effects after a crash and a retry |\n|---|{}---|\n", "--:|".repeat(columns.len()));
    for (way, crash) in crashes {
        let rate = |table: &Table| Some(figure(table.speed(way)?.rate()));
        let cells: String = columns.iter().map(|(_, table)| cell(&table.and_then(rate).unwrap_or_default())).collect();
        let _ = writeln!(text, "| {way} |{cells} {crash} |");
    }
    text.trim_end().to_owned()
}

/// What one call of each kind writes, beside the code without the crate.
fn costs(results: &Results) -> String {
    let mark = marks::name(1);
    let units = [
        (first_call::NAME, "call", "first call", [library::NAME, usual::NAME]),
        (replay::NAME, "replay", "replay", [library::NAME, usual::NAME]),
        (marks::NAME, "key", "mark", [&*mark, marks::BARE]),
        (lease::NAME, "lease", "leased operation", [library::NAME, lease::BARE]),
    ];
    let columns = [WAL, HEAP, INDEX];
    let heads: String = columns.iter().map(|column| cell(column)).collect();
    let mut text = format!("| | |{heads}\n|---|---|{}\n", "--:|".repeat(columns.len()));
    for (case, unit, what, ways) in units {
        for way in ways {
            let cost = |column: &&str| results.find(case, &footprint::title(unit), "")?.cost(way, column).map(figure);
            let cells: String = columns.iter().map(|column| cell(&cost(column).unwrap_or_default())).collect();
            let _ = writeln!(text, "| {what} | {way} |{cells}");
        }
    }
    text.trim_end().to_owned()
}
