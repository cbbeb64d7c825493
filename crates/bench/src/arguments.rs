//! The command line of `script/bench`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::cases::{CASES, CITUS};

const USAGE: &str = "usage: script/bench [--quick] [--rtt 1ms] [--only CASE | --citus | --soak MINUTES] [--redraw]";

#[derive(Debug, Default)]
pub(crate) struct Arguments {
    /// Whether everything works, in seconds; the figures say little.
    pub(crate) quick: bool,
    /// A round trip's time for the cases that are measured over a network too.
    pub(crate) rtt: Option<Duration>,
    /// No measurement: writes page and charts again, from the figures of the last whole run.
    pub(crate) redraw: bool,
    /// No comparison: the service at a steady rate for this many minutes.
    pub(crate) soak: Option<usize>,
    only: Option<String>,
    /// The case that needs a cluster of Citus, and has a page of its own.
    citus: bool,
}

impl Arguments {
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut parsed = Self::default();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--quick" => parsed.quick = true,
                "--rtt" => parsed.rtt = Some(milliseconds(&arguments.next().context(USAGE)?)?),
                "--only" => parsed.only = Some(known(arguments.next().context(USAGE)?)?),
                "--soak" => {
                    parsed.soak = Some(arguments.next().context(USAGE)?.parse().context("--soak takes minutes")?)
                }
                "--redraw" => parsed.redraw = true,
                "--citus" => parsed.citus = true,
                _ => bail!("{argument}? {USAGE}\n{}", cases()),
            }
        }
        Ok(parsed)
    }

    pub(crate) fn wants(&self, case: &str) -> bool {
        if self.citus { case == CITUS } else { self.only.as_deref().map_or(case != CITUS, |only| only == case) }
    }

    /// The report's name: of its document, and of the directory beside it.
    pub(crate) fn page(&self) -> &'static str {
        if self.citus { "performance-citus" } else { "performance" }
    }

    /// The repository keeps the report of a whole run, and that of `--citus`; all others go to `target/tmp`.
    pub(crate) fn directory(&self) -> anyhow::Result<PathBuf> {
        if !self.quick && self.only.is_none() {
            return Ok(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs"));
        }
        // This program is target/PROFILE/bench.
        let program = std::env::current_exe()?;
        Ok(program.ancestors().nth(2).context("the program is not in a target directory")?.join("tmp"))
    }

    /// The command that makes the same report again.
    pub(crate) fn command(&self) -> String {
        let mut command = "script/bench".to_owned();
        if self.quick {
            command += " --quick";
        }
        if let Some(rtt) = self.rtt {
            command += &format!(" --rtt {}ms", rtt.as_secs_f64() * 1e3);
        }
        if let Some(only) = &self.only {
            command += &format!(" --only {only}");
        }
        if self.citus {
            command += " --citus";
        }
        command
    }
}

fn milliseconds(text: &str) -> anyhow::Result<Duration> {
    let number = text.strip_suffix("ms").with_context(|| format!("--rtt {text}: give milliseconds, such as 1ms"))?;
    let milliseconds: f64 = number.parse().with_context(|| format!("--rtt {text}"))?;
    anyhow::ensure!((0.0..=1000.0).contains(&milliseconds), "--rtt {text}: at most 1000ms");
    Ok(Duration::from_secs_f64(milliseconds / 1e3))
}

fn known(case: String) -> anyhow::Result<String> {
    anyhow::ensure!(CASES.iter().any(|known| known.name == case), "there is no case {case}. {}", cases());
    Ok(case)
}

fn cases() -> String {
    format!("Cases: {}", CASES.map(|case| case.name).join(", "))
}
