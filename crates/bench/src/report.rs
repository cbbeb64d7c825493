//! All that a run came to, as it is written down.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::arguments::Arguments;
use crate::bench::Bench;
use crate::footprint::Footprint;
use crate::measure::Measured;
use crate::setting::Told;
use crate::target::{Bound, Target};
use crate::{chart, figures, markdown};

pub(crate) struct Report {
    pub(crate) command: String,
    pub(crate) page: &'static str,
    pub(crate) machine: Machine,
    pub(crate) minutes: f64,
    pub(crate) started: Instant,
    pub(crate) targets: Vec<Target>,
    pub(crate) sections: Vec<Section>,
    /// What could not be measured here.
    pub(crate) skipped: Vec<String>,
}

#[derive(Serialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) postgres: String,
    /// The load average of the minute before the run and of its last minute, which is its own work too.
    pub(crate) load: [f64; 2],
    pub(crate) day: String,
}

/// Alternatives that took turns.
pub(crate) struct Section {
    pub(crate) case: &'static str,
    pub(crate) title: String,
    pub(crate) setting: Option<Told>,
    pub(crate) unit: &'static str,
    pub(crate) rows: Vec<Row>,
}

#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) way: String,
    #[serde(flatten)]
    pub(crate) speed: Option<Speed>,
    #[serde(flatten)]
    pub(crate) footprint: Option<Footprint>,
}

#[derive(Clone, Serialize)]
pub(crate) struct Speed {
    /// The median of the rounds.
    #[serde(serialize_with = "figures::short")]
    pub(crate) per_second: f64,
    /// The slowest and the fastest round.
    #[serde(serialize_with = "figures::both_short")]
    pub(crate) range: [f64; 2],
    /// To the first row's: the median of the ratios of each round.
    #[serde(serialize_with = "figures::short")]
    pub(crate) ratio: f64,
    #[serde(serialize_with = "figures::short")]
    pub(crate) p50_ms: f64,
    #[serde(serialize_with = "figures::short")]
    pub(crate) p99_ms: f64,
}

impl Report {
    pub(crate) async fn new(bench: &Bench, arguments: &Arguments) -> anyhow::Result<Self> {
        let mut conn = bench.plain().connect(None).await?;
        let (postgres, day) =
            sqlx::query_as("select current_setting('server_version'), current_date::text").fetch_one(&mut conn).await?;
        let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = processors.lines().find(|line| line.starts_with("model name"));
        let machine = Machine {
            processor: processor.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            postgres,
            load: [load(), 0.0],
            day,
        };
        let mut skipped = Vec::new();
        if bench.redis.is_none() {
            skipped.push("Redis: no redis-server was found".to_owned());
        }
        if bench.pgbench.is_none() {
            skipped.push("pgbench: it was not found".to_owned());
        }
        Ok(Self {
            command: arguments.command(),
            page: arguments.page(),
            machine,
            minutes: 0.0,
            started: Instant::now(),
            targets: Vec::new(),
            sections: Vec::new(),
            skipped,
        })
    }

    pub(crate) fn speeds(
        &mut self,
        case: &'static str,
        title: impl Into<String>,
        setting: impl Into<Option<Told>>,
        unit: &'static str,
        measured: &[Measured],
    ) {
        let rows = measured.iter().map(|one| Row {
            way: one.way.name.clone(),
            speed: Some(Speed {
                per_second: one.rate(),
                range: one.range(),
                ratio: one.against(&measured[0]),
                p50_ms: one.percentile(0.5),
                p99_ms: one.percentile(0.99),
            }),
            footprint: None,
        });
        self.tell(Section { case, title: title.into(), setting: setting.into(), unit, rows: rows.collect() });
    }

    pub(crate) fn footprints(
        &mut self,
        case: &'static str,
        unit: &'static str,
        footprints: impl IntoIterator<Item = (String, Option<Footprint>)>,
    ) {
        let rows = footprints.into_iter().filter(|(_, footprint)| footprint.is_some()).map(|(way, footprint)| Row {
            way,
            speed: None,
            footprint,
        });
        self.tell(Section { case, title: format!("What one {unit} takes"), setting: None, unit, rows: rows.collect() });
    }

    fn tell(&mut self, section: Section) {
        eprintln!("{}", markdown::section(&section));
        self.sections.push(section);
    }

    pub(crate) fn target(
        &mut self,
        case: &'static str,
        what: impl Into<String>,
        setting: impl Into<Option<Told>>,
        wanted: Bound,
        seen: Option<f64>,
    ) {
        match seen {
            Some(seen) => self.targets.push(Target::new(case, what.into(), setting.into(), wanted, seen)),
            None => self.skipped.push(what.into()),
        }
    }

    pub(crate) fn end(&mut self) {
        self.machine.load[1] = load();
        self.minutes = self.started.elapsed().as_secs_f64() / 60.0;
    }

    /// Gives the document's place.
    pub(crate) fn write(&self, arguments: &Arguments) -> anyhow::Result<PathBuf> {
        let directory = arguments.directory()?;
        let (document, beside) = (directory.join(format!("{}.md", self.page)), directory.join(self.page));
        // A chart that is no longer made is not to stay.
        if beside.exists() {
            std::fs::remove_dir_all(&beside)?;
        }
        std::fs::create_dir_all(&beside)?;
        std::fs::write(beside.join("figures.json"), figures::in_lines(self)?)?;
        for (name, svg) in chart::charts(self) {
            std::fs::write(beside.join(name), svg)?;
        }
        std::fs::write(&document, markdown::document(self))?;
        Ok(document)
    }
}

fn load() -> f64 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().and_then(|minute| minute.parse().ok()).unwrap_or(f64::NAN)
}
