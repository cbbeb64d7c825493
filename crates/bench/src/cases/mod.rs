//! What is measured.

mod allocations;
mod citus;
mod fingerprint;
pub(crate) mod first_call;
mod growth;
pub(crate) mod http;
mod janitor;
mod lease;
mod marks;
mod partitions;
mod protect;
mod records;
pub(crate) mod replay;
mod steps;
mod storm;

use std::pin::Pin;

use crate::bench::Bench;
use crate::report::Report;

/// Not part of a whole run.
pub(crate) const CITUS: &str = citus::NAME;

type Running<'r> = Pin<Box<dyn Future<Output = anyhow::Result<()>> + 'r>>;

#[derive(Clone, Copy)]
pub(crate) struct Case {
    /// For `--only`, and the chart's file.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) run: for<'r> fn(&'r Bench, &'r mut Report) -> Running<'r>,
}

pub(crate) const CASES: [Case; 14] = [
    Case {
        name: "first_call",
        title: "First call",
        about: first_call::ABOUT,
        run: |bench, report| Box::pin(first_call::run(bench, report)),
    },
    Case {
        name: "replay",
        title: "Replay",
        about: replay::ABOUT,
        run: |bench, report| Box::pin(replay::run(bench, report)),
    },
    Case {
        name: "marks",
        title: "Marks",
        about: marks::ABOUT,
        run: |bench, report| Box::pin(marks::run(bench, report)),
    },
    Case {
        name: "lease",
        title: "Lease",
        about: lease::ABOUT,
        run: |bench, report| Box::pin(lease::run(bench, report)),
    },
    Case {
        name: "steps",
        title: "Steps",
        about: steps::ABOUT,
        run: |bench, report| Box::pin(steps::run(bench, report)),
    },
    Case {
        name: "storm",
        title: "Storm on one key",
        about: storm::ABOUT,
        run: |bench, report| Box::pin(storm::run(bench, report)),
    },
    Case {
        name: "http",
        title: "HTTP layer",
        about: http::ABOUT,
        run: |bench, report| Box::pin(http::run(bench, report)),
    },
    Case {
        name: "allocations",
        title: "Allocations",
        about: allocations::ABOUT,
        run: |bench, report| Box::pin(allocations::run(bench, report)),
    },
    Case {
        name: "fingerprint",
        title: "Fingerprint",
        about: fingerprint::ABOUT,
        run: |bench, report| Box::pin(fingerprint::run(bench, report)),
    },
    Case {
        name: "janitor",
        title: "Janitor",
        about: janitor::ABOUT,
        run: |bench, report| Box::pin(janitor::run(bench, report)),
    },
    Case {
        name: "growth",
        title: "A growing table",
        about: growth::ABOUT,
        run: |bench, report| Box::pin(growth::run(bench, report)),
    },
    Case {
        name: "partitions",
        title: "Hash partitions",
        about: partitions::ABOUT,
        run: |bench, report| Box::pin(partitions::run(bench, report)),
    },
    Case {
        name: "protect",
        title: "Protected tables",
        about: protect::ABOUT,
        run: |bench, report| Box::pin(protect::run(bench, report)),
    },
    Case {
        name: CITUS,
        title: "On Citus",
        about: citus::ABOUT,
        run: |bench, report| Box::pin(citus::run(bench, report)),
    },
];
