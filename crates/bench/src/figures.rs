//! The page with every figure, docs/performance-figures.md. Its text is in `figures.template` beside this file.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::bail;

use crate::cases::CASES;
use crate::results::{Results, Run, Speed, Table, figure};
use crate::template::filled;

const TEMPLATE: &str = include_str!("figures.template");

pub(crate) fn page(results: &Results) -> anyhow::Result<String> {
    // The section of a case that was not measured is left out.
    let is_measured = |section: &&str| match section.split_once("{{tables ") {
        Some((_, case)) => results.tables.iter().any(|table| case.starts_with(&format!("{}}}}}", table.case))),
        None => true,
    };
    let sections: Vec<_> = TEMPLATE.split("\n## ").filter(is_measured).collect();
    filled(&sections.join("\n## "), |name| match name.split_once(' ') {
        Some(("tables", case)) => Ok(tables(results.tables.iter().filter(|table| table.case == case))),
        _ if name == "runs" => Ok(results.runs.iter().map(run).collect::<Vec<_>>().join("\n")),
        _ if name == "targets" => Ok(targets(results)),
        _ => bail!("nothing is known about the placeholder {name}"),
    })
}

fn run(run: &Run) -> String {
    format!(
        "- `{}` ran on {} for {} minutes: {}, {} cores that clients and server shared, PostgreSQL {} with fsync on and \
         128 MB of shared buffers. The load average was {:.2} in the minute before the run, and {:.2} in its last minute.",
        run.command,
        run.day,
        figure(run.minutes),
        run.processor,
        run.cores,
        run.postgres,
        run.load[0],
        run.load[1],
    )
}

/// The targets of the cases that were measured, beside their figures.
pub(crate) fn targets(results: &Results) -> String {
    let mut text = "| Target | Where | Wanted | Measured | |\n|---|---|--:|--:|---|".to_owned();
    for case in CASES.iter().filter(|case| results.tables.iter().any(|table| table.case == case.name)) {
        for target in case.targets {
            let (what, wanted) = (format!("{}: {}", case.title, target.what()), target.wanted);
            let values = target.values(case, results);
            for (column, value) in &values {
                let verdict = if target.is_met(*value) { "met" } else { "**not met**" };
                let _ = write!(text, "\n| {what} | {column} | {wanted} | {} | {verdict} |", target.shown(*value));
            }
            if values.is_empty() {
                let _ = write!(text, "\n| {what} | | {wanted} | | not measured |");
            }
        }
    }
    text
}

/// Tables with the same title are columns of one table.
pub(crate) fn tables<'t>(tables: impl Iterator<Item = &'t Table>) -> String {
    let tables: Vec<_> = tables.collect();
    let mut text = String::new();
    let mut titles: Vec<&str> = Vec::new();
    for table in &tables {
        if !titles.contains(&table.title.as_str()) {
            titles.push(&table.title);
        }
    }
    for title in titles {
        let columns: Vec<_> = tables.iter().filter(|table| table.title == title).collect();
        let timed: Vec<_> = columns.iter().filter(|table| table.rows.iter().any(|row| row.speed.is_some())).collect();
        let rows = || columns[0].rows.iter();
        let costs: BTreeSet<&String> = rows().flat_map(|row| row.costs.keys()).collect();
        let unit = match columns[0].unit.as_str() {
            "" => String::new(),
            unit => format!(": {unit} a second (p50, p99 in ms)"),
        };
        let heads: String =
            timed.iter().map(|table| &table.column).chain(costs.iter().copied()).map(|head| cell(head)).collect();
        let rule = "--:|".repeat(timed.len() + costs.len());
        let _ = write!(text, "**{title}{unit}**\n\n| |{heads}\n|---|{rule}\n");
        for row in rows() {
            let speeds = timed.iter().map(|table| table.speed(&row.way).map(speed));
            let costs = costs.iter().map(|cost| row.costs.get(*cost).map(|value| figure(*value)));
            let cells: String = speeds.chain(costs).map(|text| cell(&text.unwrap_or_default())).collect();
            let _ = writeln!(text, "| {} |{cells}", row.way);
        }
        text.push('\n');
    }
    text.trim_end().to_owned()
}

fn speed(speed: &Speed) -> String {
    format!("{} ({}, {})", figure(speed.rate()), figure(speed.p50_ms), figure(speed.p99_ms))
}

pub(crate) fn cell(text: &str) -> String {
    format!(" {text} |")
}
