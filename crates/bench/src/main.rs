//! What the crate costs beside the bare transaction, and beside what people would use instead. `script/bench` runs it
//! on a server of its own. docs/performance.md answers the questions of a reader with pictures, and
//! docs/performance-figures.md contains every figure.

mod alternatives;
mod arguments;
mod bench;
mod cases;
mod client;
mod delay;
mod figures;
mod footprint;
mod guard;
mod measure;
mod page;
mod pictures;
mod processor;
mod redis;
mod results;
mod setting;
mod template;
mod way;

use std::fs;

use anyhow::ensure;
use clap::Parser as _;

use crate::arguments::Arguments;
use crate::bench::Bench;
use crate::cases::{CASES, soak};
use crate::results::{Results, Run, json, rounded};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if let Some(only) = &arguments.only {
        let cases = CASES.map(|case| case.name);
        ensure!(cases.contains(&only.as_str()), "there is no case {only}. Cases: {}", cases.join(", "));
    }
    if arguments.guard || arguments.keep {
        return guard::run(&Bench::start(&arguments).await?, arguments.keep).await;
    }
    let directory = arguments.directory()?;
    let beside = directory.join("performance");
    if !arguments.redraw {
        let text = measure(&arguments).await?;
        fs::create_dir_all(&beside)?;
        fs::write(beside.join(arguments.file()), text)?;
    }
    let results = Results::read(&beside)?;
    ensure!(!results.runs.is_empty(), "{} contains no run", beside.display());
    pictures::draw(&results, &beside)?;
    fs::write(directory.join("performance.md"), page::page(&results)?)?;
    fs::write(directory.join("performance-figures.md"), figures::page(&results)?)?;
    println!("{}\nwritten to {}", figures::targets(&results), directory.display());
    Ok(())
}

/// The file of a new run.
async fn measure(arguments: &Arguments) -> anyhow::Result<String> {
    let wanted = |case: &str| match (arguments.soak, &arguments.only) {
        (Some(_), _) => case == soak::NAME,
        (_, Some(only)) => case == only,
        _ => case != soak::NAME,
    };
    let bench = Bench::start(arguments).await?;
    let (before, started) = (load(), std::time::Instant::now());
    let mut tables = Vec::new();
    for case in CASES.iter().filter(|case| wanted(case.name)) {
        let began = std::time::Instant::now();
        let mut measured = (case.run)(&bench).await?;
        measured.iter_mut().for_each(|table| table.case = case.name.to_owned());
        eprintln!("{}\n", figures::tables(measured.iter()));
        eprintln!("== {} took {:.0} s\n", case.name, began.elapsed().as_secs_f64());
        tables.extend(measured);
    }
    let minutes = started.elapsed().as_secs_f64() / 60.0;
    eprintln!("== all measured in {minutes:.1} minutes\n");
    let mut conn = bench.plain().connect(None).await?;
    let (postgres, day) =
        sqlx::query_as("select current_setting('server_version'), current_date::text").fetch_one(&mut conn).await?;
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = processors.lines().find(|line| line.starts_with("model name"));
    let run = Run {
        command: arguments.command(),
        day,
        minutes: rounded(minutes),
        processor: processor.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown").to_owned(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        postgres,
        load: [before, load()],
    };
    Ok(json(&run, &tables)?)
}

fn load() -> f64 {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().and_then(|minute| minute.parse().ok()).unwrap_or_default()
}
