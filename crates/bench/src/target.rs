//! Every target of the benchmarks.

use crate::report::Figure;
use crate::setting::Told;
use Where::{Anywhere, OneMillisecond, SocketDurable, SocketNotDurable};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// The settings in which a target applies.
#[derive(Clone, Copy, Debug)]
enum Where {
    /// All settings, and figures without one.
    Anywhere,
    SocketDurable,
    SocketNotDurable,
    OneMillisecond,
}

pub(crate) struct Target {
    pub(crate) case: &'static str,
    pub(crate) what: &'static str,
    at: Where,
    pub(crate) wanted: Bound,
    /// A better value, which is not demanded.
    pub(crate) goal: Option<f64>,
}

/// In the order of the page. [`Target::what`] is the text with which the case reports its figure; the page lists a target
/// without a figure as not measured.
pub(crate) const TARGETS: &[Target] = &[
    at_least(0.88, "first_call", "First call, 300 B: rate over that of usual hand-written code", SocketDurable)
        .goal(0.95),
    at_least(0.9, "first_call", "First call, 4 KB: rate over that of usual hand-written code", SocketDurable).goal(1.0),
    at_least(2.5, "first_call", "First call, 256 KB: rate over that of usual hand-written code", SocketDurable),
    at_least(0.76, "first_call", "First call, 300 B: rate over that of usual hand-written code", SocketNotDurable)
        .goal(0.85),
    at_least(0.98, "first_call", "First call, 300 B: rate over that of usual hand-written code", OneMillisecond),
    at_least(
        1.25,
        "first_call",
        "First call, fewest round trips: rate over that of usual hand-written code",
        OneMillisecond,
    ),
    at_most(1.75, "first_call", "First call, 300 B: p50 over that of the bare transaction", OneMillisecond),
    at_most(
        1.15,
        "first_call",
        "First call, fewest round trips: p50 over that of the bare transaction",
        OneMillisecond,
    )
    .goal(1.08),
    at_least(0.95, "first_call", "First call, 300 B: rate over that of the same SQL by hand", Anywhere),
    at_least(
        0.95,
        "first_call",
        "First call, by run: rate over that in a transaction from the same pool",
        SocketDurable,
    ),
    at_most(2.0, "first_call", "First call: round trips more than the bare transaction", Anywhere),
    at_most(950.0, "first_call", "First call: bytes of WAL more than the bare transaction", Anywhere),
    at_least(0.85, "replay", "Replay, select first: rate over that of a bare primary-key select", Anywhere),
    at_most(1.0, "replay", "Replay, select first: round trips", Anywhere),
    at_least(8.0, "marks", "Marks: rate of a hundred at once over that of one by one", SocketDurable),
    at_least(8.0, "marks", "Marks: rate of a hundred at once over that of one by one", SocketNotDurable),
    at_most(10.0, "storm", "Storm, Wait: ms that it adds to other keys' p99", Anywhere),
    at_most(10.0, "storm", "Storm, Reject: ms that it adds to other keys' p99", Anywhere),
    at_most(10.0, "http", "Storm over HTTP, Wait: ms that it adds to other keys' p99", Anywhere),
    at_most(10.0, "http", "Storm over HTTP, Reject: ms that it adds to other keys' p99", Anywhere),
    at_least(0.5, "http", "HTTP, first call: rate over that of the bare handler", SocketDurable),
    at_least(0.75, "http", "HTTP, first call, fewest round trips: rate over that of the bare handler", OneMillisecond),
    at_least(0.85, "http", "HTTP, replay: rate over that of the bare handler", SocketDurable),
    at_least(0.9, "http", "HTTP, first call: rate over that of the hand-made handler", SocketDurable),
    at_least(1.0, "http", "HTTP, replay: rate over that of the hand-made handler", SocketDurable),
    at_least(1.5, "http", "HTTP, replay, select first: rate over that of the hand-made handler", SocketDurable),
    at_least(0.85, "http", "HTTP, replay, select first: rate over that of the bare handler", OneMillisecond),
    at_least(0.9, "janitor", "Janitor, paced: rate of first calls beside it over that without it", Anywhere),
    at_least(100_000.0, "janitor", "Janitor, unpaced: rows a second", Anywhere),
    at_most(1.3, "growth", "Growth: time of first calls at 10000000 records over that at 10000", Anywhere),
    at_most(1.3, "growth", "Growth: time of replays at 10000000 records over that at 10000", Anywhere),
    at_least(0.98, "protect", "First call: rate with the mark over that without", Anywhere),
    at_most(10.0, "protect", "Protected table: µs that a statement takes more", Anywhere),
    at_least(0.3, "citus", "First call, 32 shards, 8 clients: rate over that of plain", Anywhere),
    at_least(0.25, "citus", "Replay, 32 shards, 8 clients: rate over that of plain", Anywhere),
    at_least(0.4, "citus", "One mark, 32 shards, 8 clients: rate over that of plain", Anywhere),
    at_most(150.0, "citus", "100 marks of 100 scopes, 32 shards, 1 client: p50, ms", Anywhere),
    at_most(1.15, "citus", "First call: time with 128 shards over that with 8", Anywhere),
];

const fn at_least(least: f64, case: &'static str, what: &'static str, at: Where) -> Target {
    Target { case, what, at, wanted: Bound::AtLeast(least), goal: None }
}

const fn at_most(most: f64, case: &'static str, what: &'static str, at: Where) -> Target {
    Target { case, what, at, wanted: Bound::AtMost(most), goal: None }
}

impl Target {
    const fn goal(self, goal: f64) -> Self {
        Self { goal: Some(goal), ..self }
    }

    pub(crate) fn is_of(&self, figure: &Figure) -> bool {
        let applies = match (self.at, figure.setting) {
            (Anywhere, _) => true,
            (SocketDurable, setting) => setting == Some(Told { synchronous_commit: true, rtt_ms: None }),
            (SocketNotDurable, setting) => setting == Some(Told { synchronous_commit: false, rtt_ms: None }),
            (OneMillisecond, setting) => setting == Some(Told { synchronous_commit: true, rtt_ms: Some(1.0) }),
        };
        applies && figure.case == self.case && figure.what == self.what
    }

    /// The setting, in words.
    pub(crate) fn place(&self) -> &'static str {
        match self.at {
            Anywhere => "",
            SocketDurable => "Unix socket",
            SocketNotDurable => "Unix socket, synchronous_commit off",
            OneMillisecond => "1 ms a round trip",
        }
    }

    pub(crate) fn is_met(&self, value: f64) -> bool {
        match self.wanted {
            Bound::AtLeast(least) => value >= least,
            Bound::AtMost(most) => value <= most,
        }
    }
}
