//! The page with every figure, docs/performance-figures.md, which only this program writes.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::cases::CASES;
use crate::results::{Results, Speed, Table, figure};

const WIDTH: usize = 120;

pub(crate) fn page(results: &Results) -> String {
    let mut text = "# Every figure of the benchmarks\n\n\
         `script/bench` wrote this page. [performance.md](performance.md) answers the questions of a reader, and the files in \
         [performance](performance) contain the same figures for programs.\n\n## Method\n\n\
         The alternatives of a table took turns, A B C A B C …. A rate is the median of the rounds. A ratio is the \
         median of each round's ratio, so a machine that becomes slower affects all alternatives equally. Compare the ratios; \
         the absolute figures apply to one machine.\n\n\
         The costs of one call were counted with one client. A proxy counted round trips, and the server counted WAL and bytes. \
         Heap and index are those of the keys' table.\n\n\
         A cell such as 4410 (1.72, 3.33) means 4410 a second, a median time of 1.72 ms, and a 99th percentile of 3.33 ms. \
         `synchronous_commit` is on where the column does not say off.\n\n"
        .to_owned();
    for run in &results.runs {
        let _ = writeln!(
            text,
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
        );
    }
    let _ = write!(
        text,
        "\n## Targets\n\n*Rate of X over Y* means the rate of X divided by the rate of Y, within one run.\n\n{}",
        targets(results)
    );
    for case in CASES {
        let of_case: Vec<_> = results.tables.iter().filter(|table| table.case == case.name).collect();
        if !of_case.is_empty() {
            let _ = write!(text, "\n## {}\n\n{}\n\n{}", case.title, case.measures, tables(&of_case));
        }
    }
    wrapped(text.trim_end())
}

/// The targets of the cases that were measured, beside their figures.
pub(crate) fn targets(results: &Results) -> String {
    let mut text = "| Target | Where | Wanted | Measured | |\n|---|---|--:|--:|---|\n".to_owned();
    for case in CASES.iter().filter(|case| results.tables.iter().any(|table| table.case == case.name)) {
        for target in case.targets {
            let (what, wanted) = (format!("{}: {}", case.title, target.what()), target.wanted);
            let goal = target.goal.map(|goal| format!(" (goal {goal})")).unwrap_or_default();
            let values = target.values(case, results);
            for (column, value) in &values {
                let verdict = if target.is_met(*value) { "met" } else { "**not met**" };
                let _ = writeln!(text, "| {what} | {column} | {wanted}{goal} | {} | {verdict} |", target.shown(*value));
            }
            if values.is_empty() {
                let _ = writeln!(text, "| {what} | | {wanted}{goal} | | not measured |");
            }
        }
    }
    text
}

/// The targets that were missed, as a list.
pub(crate) fn missed(results: &Results) -> String {
    let mut text = String::new();
    for case in CASES {
        for target in case.targets {
            let (what, wanted) = (target.what(), target.wanted);
            for (column, value) in target.values(&case, results).iter().filter(|(_, value)| !target.is_met(*value)) {
                let _ =
                    writeln!(text, "- {}, {column}: {what}: {}, wanted {wanted}.", case.title, target.shown(*value));
            }
        }
    }
    text
}

/// Tables with the same title are columns of one table.
pub(crate) fn tables(tables: &[&Table]) -> String {
    let mut text = String::new();
    let mut titles: Vec<&str> = Vec::new();
    for table in tables {
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
    text
}

fn speed(speed: &Speed) -> String {
    format!("{} ({}, {})", figure(speed.rate()), figure(speed.p50_ms), figure(speed.p99_ms))
}

pub(crate) fn cell(text: &str) -> String {
    format!(" {text} |")
}

/// Paragraphs in lines of 120 characters. Tables, headings, images and lists keep their lines.
pub(crate) fn wrapped(text: &str) -> String {
    let paragraph = |paragraph: &str| {
        if paragraph.starts_with(['|', '#', '!', '-']) {
            return paragraph.to_owned();
        }
        let (mut wrapped, mut length) = (String::new(), 0);
        for word in paragraph.split_whitespace() {
            let more = word.chars().count();
            if length > 0 && length + more >= WIDTH {
                wrapped.push('\n');
                length = 0;
            } else if length > 0 {
                wrapped.push(' ');
                length += 1;
            }
            wrapped.push_str(word);
            length += more;
        }
        wrapped
    };
    text.split("\n\n").map(paragraph).collect::<Vec<_>>().join("\n\n").trim_end().to_owned() + "\n"
}
