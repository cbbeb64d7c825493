//! The command line of `script/bench`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;

/// Measures pg-idempotency beside its alternatives.
#[derive(Debug, clap::Parser)]
#[command(name = "script/bench")]
pub(crate) struct Arguments {
    /// Only check that everything works, in seconds; the figures say little
    #[arg(long)]
    pub(crate) quick: bool,
    /// Measure also over a network whose round trips take this long, such as 1ms
    #[arg(long, value_parser = milliseconds)]
    pub(crate) rtt: Option<Duration>,
    /// Measure this case alone, and write to target/tmp
    #[arg(long, conflicts_with = "soak")]
    pub(crate) only: Option<String>,
    /// Make calls at a steady rate for this many minutes; the repository keeps a run of 30 minutes or more
    #[arg(long, value_name = "MINUTES")]
    pub(crate) soak: Option<usize>,
    /// Compare the processor time of a few calls with that of the release before, and fail if they became slower
    #[arg(long)]
    pub(crate) guard: bool,
    /// Measure what --guard does, and keep it as the figures of this release
    #[arg(long)]
    pub(crate) keep: bool,
    /// Measure nothing, and write the pages again from the files of the last runs
    #[arg(long)]
    pub(crate) redraw: bool,
}

impl Arguments {
    /// The directory of the pages. The repository keeps those of complete runs.
    pub(crate) fn directory(&self) -> anyhow::Result<PathBuf> {
        if !self.quick && self.only.is_none() && self.soak.is_none_or(|minutes| minutes >= 30) {
            return Ok(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs"));
        }
        // This program is target/PROFILE/bench.
        let program = std::env::current_exe()?;
        Ok(program.ancestors().nth(2).context("the program is not in a target directory")?.join("tmp"))
    }

    /// The name of the file that keeps this run.
    pub(crate) fn file(&self) -> &'static str {
        if self.soak.is_some() { "soak.json" } else { "figures.json" }
    }

    /// The command that makes the same run again.
    pub(crate) fn command(&self) -> String {
        let words = std::env::args().skip(1);
        ["script/bench".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
    }
}

fn milliseconds(text: &str) -> anyhow::Result<Duration> {
    let number = text.strip_suffix("ms").context("give milliseconds, such as 1ms")?;
    let milliseconds: f64 = number.parse()?;
    anyhow::ensure!((0.0..=1000.0).contains(&milliseconds), "at most 1000ms");
    Ok(Duration::from_secs_f64(milliseconds / 1e3))
}
