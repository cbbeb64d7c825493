//! What a run has measured, as `figures.json` keeps it: tables, with one line for each row and four digits for each
//! figure, so that a new run is a short diff. Every ratio, target and sentence is computed from these tables.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// The columns of most tables: how the server is reached, and how durable its commits are.
pub(crate) const SOCKET: &str = "Unix socket";
pub(crate) const NOT_DURABLE: &str = "Unix socket, synchronous_commit off";
pub(crate) const ONE_MILLISECOND: &str = "1 ms a round trip";

/// The title of the table to which most targets of a case apply.
pub(crate) const MAIN: &str = "300 B of response, 8 clients";

#[derive(Default)]
pub(crate) struct Results {
    pub(crate) runs: Vec<Run>,
    pub(crate) tables: Vec<Table>,
}

#[derive(Deserialize, Serialize)]
pub(crate) struct Run {
    pub(crate) command: String,
    pub(crate) day: String,
    pub(crate) minutes: f64,
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) postgres: String,
    /// The load average of the minute before the run and of its last minute, which includes the run's own work.
    pub(crate) load: [f64; 2],
}

/// Alternatives that took turns. Tables with the same title are columns of one table on the page.
#[derive(Deserialize, Serialize)]
pub(crate) struct Table {
    pub(crate) case: String,
    pub(crate) title: String,
    pub(crate) column: String,
    /// The unit that a rate counts. It is empty if the table has costs only.
    pub(crate) unit: String,
    pub(crate) rows: Vec<Row>,
}

#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct Row {
    pub(crate) way: String,
    #[serde(flatten)]
    pub(crate) speed: Option<Speed>,
    /// The costs of one call, or other observations. The names are the heads of the columns.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) costs: BTreeMap<String, f64>,
}

#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct Speed {
    /// The rate of each round.
    pub(crate) rounds: Vec<f64>,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
}

impl Row {
    pub(crate) fn new(way: impl Into<String>, rounds: Vec<f64>, mut latencies: Vec<f64>) -> Self {
        latencies.sort_by(f64::total_cmp);
        let time = |share| rounded(percentile(&latencies, share));
        let rounds = rounds.into_iter().map(rounded).collect();
        let speed = Speed { rounds, p50_ms: time(0.5), p99_ms: time(0.99) };
        Self { way: way.into(), speed: Some(speed), costs: BTreeMap::new() }
    }
}

impl Speed {
    /// Units a second: the median of the rounds.
    pub(crate) fn rate(&self) -> f64 {
        median(self.rounds.clone())
    }
}

impl Table {
    /// The program adds the name of the case.
    pub(crate) fn new(title: impl Into<String>, column: impl Into<String>, unit: &str, rows: Vec<Row>) -> Self {
        Self { case: String::new(), title: title.into(), column: column.into(), unit: unit.to_owned(), rows }
    }

    pub(crate) fn speed(&self, way: &str) -> Option<&Speed> {
        self.rows.iter().find(|row| row.way == way)?.speed.as_ref()
    }

    pub(crate) fn p50(&self, way: &str) -> Option<f64> {
        Some(self.speed(way)?.p50_ms)
    }

    /// The median of the ratios of each round.
    pub(crate) fn rate_over(&self, way: &str, other: &str) -> Option<f64> {
        let (way, other) = (self.speed(way)?, self.speed(other)?);
        Some(median(way.rounds.iter().zip(&other.rounds).map(|(way, other)| way / other).collect()))
    }

    pub(crate) fn p50_over(&self, way: &str, other: &str) -> Option<f64> {
        Some(self.p50(way)? / self.p50(other)?)
    }

    pub(crate) fn cost(&self, way: &str, name: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.way == way)?.costs.get(name).copied()
    }
}

impl Results {
    /// The runs whose files are in this directory.
    pub(crate) fn read(directory: &Path) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Stored {
            run: Run,
            tables: Vec<Table>,
        }
        let mut results = Self::default();
        // The whole run, if there is one, comes first.
        for file in ["figures.json", "soak.json"].map(|name| directory.join(name)) {
            if file.exists() {
                let text = std::fs::read_to_string(&file)?;
                let Stored { run, tables } = serde_json::from_str(&text).with_context(|| file.display().to_string())?;
                results.runs.push(run);
                results.tables.extend(tables);
            }
        }
        Ok(results)
    }

    pub(crate) fn find(&self, case: &str, title: &str, column: &str) -> Option<&Table> {
        self.tables.iter().find(|table| table.case == case && table.title == title && table.column == column)
    }

    pub(crate) fn titled(&self, case: &str, title: &str) -> Vec<&Table> {
        self.tables.iter().filter(|table| table.case == case && table.title == title).collect()
    }
}

/// The file of one run.
pub(crate) fn json(run: &Run, tables: &[Table]) -> serde_json::Result<String> {
    let in_lines = |table| Ok(serde_json::to_string(table)?.replace("{\"way\"", "\n{\"way\""));
    let tables = tables.iter().map(in_lines).collect::<serde_json::Result<Vec<_>>>()?;
    Ok(format!("{{\"run\":{},\n\"tables\":[\n{}\n]}}\n", serde_json::to_string(run)?, tables.join(",\n")))
}

/// Three digits, or all digits before the point.
pub(crate) fn figure(value: f64) -> String {
    let digits = match value.abs() {
        large if large >= 100.0 => 0,
        middle if middle >= 10.0 => 1,
        small if small >= 1.0 || small == 0.0 => 2,
        tiny if tiny >= 0.01 => 3,
        _ => 5,
    };
    let text = format!("{value:.digits$}");
    if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Four digits are more than a second run repeats.
pub(crate) fn rounded(figure: f64) -> f64 {
    format!("{figure:.3e}").parse().unwrap_or(figure)
}

pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    percentile(&figures, 0.5)
}

/// The figures are in order.
fn percentile(figures: &[f64], share: f64) -> f64 {
    figures.get((figures.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN)
}
