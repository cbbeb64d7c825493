//! The table of cases: what each one measures, and its targets.

pub(crate) mod any_language;
pub(crate) mod first_call;
pub(crate) mod growth;
pub(crate) mod http;
pub(crate) mod janitor;
pub(crate) mod lease;
pub(crate) mod marks;
pub(crate) mod memory;
pub(crate) mod night;
pub(crate) mod protect;
mod records;
pub(crate) mod replay;
pub(crate) mod soak;
pub(crate) mod storm;

use std::pin::Pin;

use crate::alternatives::{BARE, by_hand, handler, library, sql_functions, usual};
use crate::bench::Bench;
use crate::footprint::{ROUND_TRIPS, WAL};
use crate::results::{MAIN, NOT_DURABLE, ONE_MILLISECOND, Results, SOCKET, Table, figure};

type Measuring<'b> = Pin<Box<dyn Future<Output = anyhow::Result<Vec<Table>>> + 'b>>;

#[derive(Clone, Copy)]
pub(crate) struct Case {
    /// For `--only`.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) targets: &'static [Target],
    pub(crate) run: for<'b> fn(&'b Bench) -> Measuring<'b>,
}

/// A figure of a case, and what it should be. It applies to the tables of the case with this title, and in this column
/// if one is named.
pub(crate) struct Target {
    value: Value,
    pub(crate) wanted: Bound,
    title: &'static str,
    column: Option<&'static str>,
}

enum Value {
    /// The rate of the first way over that of the second one.
    Rate(&'static str, &'static str),
    /// The median time of the first way over that of the second one.
    P50(&'static str, &'static str),
    Other(&'static str, fn(&Table, &Results) -> Option<f64>),
}

#[derive(Clone, Copy)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}
use Bound::{AtLeast, AtMost};

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AtLeast(least) => write!(f, "≥ {least}"),
            AtMost(most) => write!(f, "≤ {most}"),
        }
    }
}

const ONE_CALL: &str = "What one call takes";

pub(crate) const CASES: [Case; 13] = [
    Case {
        name: first_call::NAME,
        title: "First call",
        targets: &[
            rate(library::NAME, usual::NAME, AtLeast(0.82)).on(SOCKET),
            rate(library::NAME, usual::NAME, AtLeast(0.72)).on(NOT_DURABLE),
            rate(library::NAME, usual::NAME, AtLeast(0.97)).on(ONE_MILLISECOND),
            rate(library::NAME, usual::NAME, AtLeast(0.84)).of(first_call::OF_ONE_SCOPE).on(SOCKET),
            rate(library::NAME, usual::NAME, AtLeast(0.75)).of(first_call::OF_ONE_SCOPE).on(NOT_DURABLE),
            rate(library::NAME, usual::NAME, AtLeast(0.97)).of(first_call::OF_ONE_SCOPE).on(ONE_MILLISECOND),
            p50(library::NAME, BARE, AtMost(1.75)).on(ONE_MILLISECOND),
            rate(library::NAME, by_hand::NAME, AtLeast(0.95)),
            rate(library::BY_RUN, library::FROM_POOL, AtLeast(0.97)).on(SOCKET),
            rate(library::NAME, usual::NAME, AtLeast(1.0)).of(first_call::BY_SIZE).on("4 KB"),
            rate(library::NAME, usual::NAME, AtLeast(3.0)).of(first_call::BY_SIZE).on("256 KB"),
            other("extra round trips, compared with the bare transaction", AtMost(2.0), |of, _| {
                Some(of.cost(library::NAME, ROUND_TRIPS)? - of.cost(BARE, ROUND_TRIPS)?)
            })
            .of(ONE_CALL),
            other("extra bytes of WAL, compared with the bare transaction", AtMost(950.0), |of, _| {
                Some(of.cost(library::NAME, WAL)? - of.cost(BARE, WAL)?)
            })
            .of(ONE_CALL),
        ],
        run: |bench| Box::pin(first_call::run(bench)),
    },
    Case {
        name: replay::NAME,
        title: "Replay",
        targets: &[
            rate(library::REPLAY_FIRST, replay::SELECT_FROM_POOL, AtLeast(0.85)),
            other("round trips with replay_first, one of them the ping of the pool", AtMost(2.0), |of, _| {
                of.cost(library::REPLAY_FIRST, ROUND_TRIPS)
            })
            .of("What one replay takes"),
        ],
        run: |bench| Box::pin(replay::run(bench)),
    },
    Case {
        name: any_language::NAME,
        title: "Any language",
        targets: &[
            rate(sql_functions::NAME, library::NAME, AtLeast(0.85)).of(any_language::FIRST_CALLS).on(SOCKET),
            p50(sql_functions::RUN, BARE, AtMost(0.6)).of(any_language::ALONE).on(ONE_MILLISECOND),
            rate(sql_functions::NAME, library::NAME, AtLeast(1.0)).of(any_language::REPLAYS).on(ONE_MILLISECOND),
        ],
        run: |bench| Box::pin(any_language::run(bench)),
    },
    Case {
        name: marks::NAME,
        title: "Marks",
        targets: &[
            other(HUNDRED, AtLeast(8.0), hundred_over_one).of(marks::TITLE).on(SOCKET),
            other(HUNDRED, AtLeast(8.0), hundred_over_one).of(marks::TITLE).on(NOT_DURABLE),
        ],
        run: |bench| Box::pin(marks::run(bench)),
    },
    Case { name: lease::NAME, title: "Lease", targets: &[], run: |bench| Box::pin(lease::run(bench)) },
    Case {
        name: storm::NAME,
        title: "Storm on one key",
        targets: &[other(STORM, AtMost(10.0), storm_adds).of(storm::TITLE)],
        run: |bench| Box::pin(storm::run(bench)),
    },
    Case {
        name: http::NAME,
        title: "HTTP layer",
        targets: &[
            rate(http::FIRST_CALL, handler::NAME, AtLeast(0.92)).on(SOCKET),
            rate(http::FIRST_CALL, handler::NAME, AtLeast(0.9)).on(NOT_DURABLE),
            rate(http::FIRST_CALL, handler::NAME, AtLeast(0.99)).on(ONE_MILLISECOND),
            rate(http::REPLAY, http::BY_HAND_REPLAY, AtLeast(0.9)).on(SOCKET),
            rate(http::REPLAY_FIRST, http::BY_HAND_REPLAY, AtLeast(1.6)).on(SOCKET),
            rate(http::FIRST_CALL, handler::NAME, AtLeast(0.85)).of(http::MANY),
            rate(http::REPLAY, http::BY_HAND_REPLAY, AtLeast(0.8)).of(http::MANY),
            rate(http::REPLAY_FIRST, http::BY_HAND_REPLAY, AtLeast(1.6)).of(http::MANY),
            rate(http::FIRST_CALL, http::BARE, AtLeast(0.5)).on(SOCKET),
            rate(http::REPLAY, http::BARE, AtLeast(0.85)).on(SOCKET),
            rate(http::REPLAY_FIRST, http::BARE, AtLeast(0.85)).on(ONE_MILLISECOND),
            other(STORM, AtMost(10.0), storm_adds).of(http::STORM),
        ],
        run: |bench| Box::pin(http::run(bench)),
    },
    Case { name: memory::NAME, title: "Memory", targets: &[], run: |_| Box::pin(memory::run()) },
    Case {
        name: protect::NAME,
        title: "Protected tables",
        targets: &[
            rate(by_hand::NAME, protect::WITHOUT, AtLeast(0.98)),
            other("extra µs for a statement on a protected table", AtMost(9.0), |of, _| {
                Some((of.p50(protect::GUARDED)? - of.p50(protect::UNGUARDED)?) * 1e3)
            })
            .of(protect::STATEMENTS),
        ],
        run: |bench| Box::pin(protect::run(bench)),
    },
    Case {
        name: janitor::NAME,
        title: "Janitor",
        targets: &[
            rate(janitor::BESIDE, janitor::WITHOUT, AtLeast(0.9)),
            other("rows that an unpaced sweep deletes a second", AtLeast(100_000.0), |of, _| {
                Some(of.speed(janitor::UNPACED)?.rate())
            })
            .of(janitor::SWEEPS),
        ],
        run: |bench| Box::pin(janitor::run(bench)),
    },
    Case {
        name: growth::NAME,
        title: "A growing table",
        targets: &[
            other("time of a first call at 10 million records, divided by that at 10 thousand", AtMost(1.3), grown)
                .of(growth::FIRST_CALLS),
            other("time of a replay at 10 million records, divided by that at 10 thousand", AtMost(1.3), grown)
                .of(growth::REPLAYS),
        ],
        run: |bench| Box::pin(growth::run(bench)),
    },
    Case {
        name: night::NAME,
        title: "After a night",
        targets: &[rate(night::EXPIRED, night::LIVE, AtLeast(0.9)).of(night::TITLE)],
        run: |bench| Box::pin(night::run(bench)),
    },
    Case {
        name: soak::NAME,
        title: "Half an hour of steady load",
        targets: &[],
        run: |bench| Box::pin(soak::run(bench)),
    },
];

const HUNDRED: &str = "keys a second in batches of 100, divided by keys a second in single marks";
const STORM: &str = "ms that a storm adds to the p99 of other keys";

const fn target(value: Value, wanted: Bound) -> Target {
    Target { value, wanted, title: MAIN, column: None }
}

const fn rate(way: &'static str, over: &'static str, wanted: Bound) -> Target {
    target(Value::Rate(way, over), wanted)
}

const fn p50(way: &'static str, over: &'static str, wanted: Bound) -> Target {
    target(Value::P50(way, over), wanted)
}

const fn other(what: &'static str, wanted: Bound, value: fn(&Table, &Results) -> Option<f64>) -> Target {
    target(Value::Other(what, value), wanted)
}

impl Target {
    const fn of(self, title: &'static str) -> Self {
        Self { title, ..self }
    }

    const fn on(self, column: &'static str) -> Self {
        Self { column: Some(column), ..self }
    }

    pub(crate) fn what(&self) -> String {
        let what = match self.value {
            Value::Rate(way, other) => format!("rate of *{way}* over *{other}*"),
            Value::P50(way, other) => format!("p50 of *{way}* over *{other}*"),
            Value::Other(what, _) => what.to_owned(),
        };
        // Two tables of a case may have the same ways.
        if self.title == MAIN { what } else { format!("{what} ({})", self.title) }
    }

    /// The columns in which the case measured it, and the figures.
    pub(crate) fn values<'r>(&self, case: &Case, results: &'r Results) -> Vec<(&'r str, f64)> {
        let of = |table: &Table| match self.value {
            Value::Rate(way, other) => table.rate_over(way, other),
            Value::P50(way, other) => table.p50_over(way, other),
            Value::Other(_, value) => value(table, results),
        };
        let tables = results.titled(case.name, self.title).into_iter();
        let tables = tables.filter(|table| self.column.is_none_or(|column| table.column == column));
        tables.filter_map(|table| Some((&*table.column, of(table)?))).collect()
    }

    /// A figure that misses its target by less than its digits show needs more digits.
    pub(crate) fn shown(&self, value: f64) -> String {
        let shown = figure(value);
        let looks_met = self.wanted.to_string().ends_with(&format!(" {shown}"));
        if looks_met && !self.is_met(value) { format!("{value:.4}") } else { shown }
    }

    pub(crate) fn is_met(&self, value: f64) -> bool {
        match self.wanted {
            AtLeast(least) => value >= least,
            AtMost(most) => value <= most,
        }
    }
}

fn hundred_over_one(of: &Table, _: &Results) -> Option<f64> {
    of.rate_over(&marks::name(100), &marks::name(1))
}

pub(crate) fn storm_adds(of: &Table, _: &Results) -> Option<f64> {
    Some(of.speed(storm::BESIDE)?.p99_ms - of.speed(storm::ALONE)?.p99_ms)
}

/// The ratio of mean times, which are the inverse of the rates.
fn grown(of: &Table, _: &Results) -> Option<f64> {
    of.rate_over(&growth::name(10_000), &growth::name(10_000_000))
}
