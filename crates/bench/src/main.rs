//! What the crate costs beside the bare transaction, and beside what people would use instead. `script/bench` runs it,
//! on a server of its own; docs/performance.md contains the last whole run.
//!
//! The alternatives of a case take turns in one run, A B C A B C …, so a machine that becomes slower affects all of
//! them equally: compare the ratios.

mod alternatives;
mod answers;
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
mod soak;
mod target;
mod way;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

/// Counts for [`footprint`]. Its four atomic additions for each allocation are borne by all alternatives.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<std::alloc::System> = &INSTRUMENTED_SYSTEM;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = arguments::Arguments::parse(std::env::args().skip(1))?;
    if let Some(minutes) = arguments.soak {
        return soak::run(&bench::Bench::start(&arguments).await?, minutes).await;
    }
    let report = if arguments.redraw { report::Report::read(&arguments)? } else { measure(&arguments).await? };
    println!("{}", markdown::targets(&report));
    let written = report.write(&arguments)?;
    println!("written to {}", written.display());
    Ok(())
}

async fn measure(arguments: &arguments::Arguments) -> anyhow::Result<report::Report> {
    let bench = bench::Bench::start(arguments).await?;
    let mut report = report::Report::new(&bench, arguments).await?;
    let started = std::time::Instant::now();
    for case in cases::CASES.iter().filter(|case| arguments.wants(case.name)) {
        eprintln!("== {}, {:.0} s after the start\n", case.name, started.elapsed().as_secs_f64());
        (case.run)(&bench, &mut report).await?;
    }
    report.end(started.elapsed());
    eprintln!("== all measured in {:.1} minutes\n", report.minutes);
    Ok(report)
}
