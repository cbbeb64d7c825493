//! All that a run came to, as it is written down.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::arguments::Arguments;
use crate::bench::Bench;
use crate::footprint::Footprint;
use crate::measure::Measured;
use crate::setting::Told;
use crate::{answers, figures, markdown};

pub(crate) struct Report {
    pub(crate) command: String,
    pub(crate) page: &'static str,
    pub(crate) machine: Machine,
    pub(crate) minutes: f64,
    pub(crate) sections: Vec<Section>,
    pub(crate) figures: Vec<Figure>,
    /// What could not be measured here.
    pub(crate) skipped: Vec<String>,
    /// What a reader of an old run has to know. It is written into `figures.json` by hand.
    pub(crate) note: Option<String>,
}

#[derive(Deserialize, Serialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) postgres: String,
    /// The load average of the minute before the run and of its last minute, which is its own work too.
    pub(crate) load: [f64; 2],
    pub(crate) day: String,
}

/// A figure of its own, often a ratio of two rows; some have a [target](crate::target).
#[derive(Deserialize, Serialize)]
pub(crate) struct Figure {
    pub(crate) case: String,
    pub(crate) what: String,
    pub(crate) setting: Option<Told>,
    #[serde(serialize_with = "figures::short")]
    pub(crate) value: f64,
}

/// Alternatives that took turns.
#[derive(Deserialize)]
pub(crate) struct Section {
    pub(crate) case: String,
    pub(crate) title: String,
    pub(crate) setting: Option<Told>,
    pub(crate) unit: String,
    pub(crate) rows: Vec<Row>,
}

#[derive(Deserialize, Serialize)]
pub(crate) struct Row {
    pub(crate) way: String,
    #[serde(flatten)]
    pub(crate) speed: Option<Speed>,
    #[serde(flatten)]
    pub(crate) footprint: Option<Footprint>,
}

#[derive(Clone, Deserialize, Serialize)]
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
            sections: Vec::new(),
            figures: Vec::new(),
            skipped,
            note: None,
        })
    }

    /// The last run, from its `figures.json`.
    pub(crate) fn read(arguments: &Arguments) -> anyhow::Result<Self> {
        let page = arguments.page();
        let file = arguments.directory()?.join(page).join("figures.json");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        figures::report(&text, page).with_context(|| file.display().to_string())
    }

    pub(crate) fn speeds(
        &mut self,
        case: &str,
        title: impl Into<String>,
        setting: impl Into<Option<Told>>,
        unit: &str,
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
        self.tell(Section {
            case: case.to_owned(),
            title: title.into(),
            setting: setting.into(),
            unit: unit.to_owned(),
            rows: rows.collect(),
        });
    }

    pub(crate) fn footprints(
        &mut self,
        case: &str,
        unit: &str,
        footprints: impl IntoIterator<Item = (String, Option<Footprint>)>,
    ) {
        let rows = footprints.into_iter().filter(|(_, footprint)| footprint.is_some()).map(|(way, footprint)| Row {
            way,
            speed: None,
            footprint,
        });
        self.tell(Section {
            case: case.to_owned(),
            title: format!("What one {unit} takes"),
            setting: None,
            unit: unit.to_owned(),
            rows: rows.collect(),
        });
    }

    fn tell(&mut self, section: Section) {
        eprintln!("{}", markdown::tables(&[&section]));
        self.sections.push(section);
    }

    /// `None` is a figure of an alternative that this machine does not have.
    pub(crate) fn figure(
        &mut self,
        case: &str,
        what: impl Into<String>,
        setting: impl Into<Option<Told>>,
        value: Option<f64>,
    ) {
        let what = what.into();
        match value {
            Some(value) => self.figures.push(Figure { case: case.to_owned(), what, setting: setting.into(), value }),
            None => self.skipped.push(what),
        }
    }

    pub(crate) fn end(&mut self, took: Duration) {
        self.machine.load[1] = load();
        self.minutes = took.as_secs_f64() / 60.0;
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
        for chart in answers::answers(self).into_iter().filter_map(|answer| answer.chart) {
            std::fs::write(beside.join(format!("{}.svg", chart.name)), chart.svg())?;
        }
        std::fs::write(&document, markdown::document(self))?;
        Ok(document)
    }
}

fn load() -> f64 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().and_then(|minute| minute.parse().ok()).unwrap_or(f64::NAN)
}
