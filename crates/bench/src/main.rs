//! What the crate costs beside the bare transaction, and beside what people would use instead. `script/bench` runs it,
//! on a server of its own; DESIGN.md tells what the figures are for, and docs/performance.md holds the last whole run.
//!
//! The alternatives of a case take turns in one run, A B C A B C …, so that a machine that drifts flatters none of
//! them: the ratios are what to look at.

mod alternatives;
mod arguments;
mod bench;
mod cases;
mod chart;
mod client;
mod figures;
mod footprint;
mod markdown;
mod measure;
mod proxy;
mod redis;
mod report;
mod setting;
mod target;
mod way;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

/// Counts for [`footprint`]. Its four atomic additions for each allocation are borne by all alternatives.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<std::alloc::System> = &INSTRUMENTED_SYSTEM;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = arguments::Arguments::parse(std::env::args().skip(1))?;
    let bench = bench::Bench::start(&arguments).await?;
    let mut report = report::Report::new(&bench, &arguments).await?;
    for case in cases::CASES.iter().filter(|case| arguments.wants(case.name)) {
        eprintln!("== {}, {:.0} s after the start\n", case.name, report.started.elapsed().as_secs_f64());
        (case.run)(&bench, &mut report).await?;
    }
    report.end();
    eprintln!("== all measured in {:.1} minutes\n", report.minutes);
    println!("{}", markdown::targets(&report));
    let written = report.write(&arguments)?;
    println!("written to {}", written.display());
    Ok(())
}
