//! The report for people.

use std::fmt::Write as _;

use crate::cases::CASES;
use crate::chart;
use crate::report::{Report, Row, Section};
use crate::setting::Told;
use crate::target::{Bound, Target};

const WIDTH: usize = 120;

pub(crate) fn document(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "# Performance\n\n\
         `{}` wrote this page on {}, in {:.0} minutes. [figures.json]({}/figures.json) contains all figures.\n\n\
         The alternatives of a table took turns in one run, A B C A B C …. A rate is the median of the rounds. A ratio is the \
         median of each round's ratio to the first line, so a machine that becomes slower affects all alternatives equally. \
         In the targets, *rate over that of X* means the rate divided by the rate of X.\n\n\
         The absolute figures apply to this machine: {}, {} cores, PostgreSQL {} with fsync on and 128 MB of shared buffers, \
         with clients and server on the same cores. The load average was {:.2} in the minute before the run, and {:.2} in its \
         last minute.\n\n\
         The costs of one call were counted with one client. A proxy counted round trips, the server counted WAL and bytes, \
         and the allocator of the client's process counted allocations, including sqlx's. Heap and index are those of the keys' \
         table. HOT is the share of its updates that wrote no index.\n\n\
         ## Targets\n\n{}\n",
        report.command,
        machine.day,
        report.minutes,
        report.page,
        machine.processor,
        machine.cores,
        machine.postgres,
        machine.load[0],
        machine.load[1],
        targets(report),
    );
    for skipped in &report.skipped {
        let _ = writeln!(text, "Not measured here: {skipped}.\n");
    }
    for case in CASES {
        let sections: Vec<_> = report.sections.iter().filter(|section| section.case == case.name).collect();
        if sections.is_empty() {
            continue;
        }
        let _ = writeln!(text, "## {}\n\n{}\n", case.title, case.about);
        if let Some(name) = chart::name(report, case.name) {
            let _ = writeln!(text, "![{}]({}/{name})\n", case.title, report.page);
        }
        for section in sections {
            let _ = writeln!(text, "{}", self::section(section));
        }
        let told: Vec<_> =
            report.targets.iter().filter(|target| target.case == case.name && !target.promised()).collect();
        if !told.is_empty() {
            let _ = writeln!(text, "| Measured, without a target | Setting | Figure |\n|---|---|--:|");
            for Target { what, setting, seen, .. } in told {
                let _ = writeln!(text, "| {what} | {} | {} |", in_words(*setting), figure(*seen));
            }
            text.push('\n');
        }
    }
    text.lines().map(wrapped).collect()
}

/// Lines of 120 characters; a table's stay.
fn wrapped(line: &str) -> String {
    let (mut wrapped, mut length) = (String::new(), 0);
    for word in line.split(' ') {
        let more = word.chars().count();
        if length > 0 && length + more >= WIDTH && !line.starts_with(['|', '!', '#']) {
            wrapped.push('\n');
            length = 0;
        } else if length > 0 {
            wrapped.push(' ');
            length += 1;
        }
        wrapped.push_str(word);
        length += more;
    }
    wrapped + "\n"
}

/// Every promise beside its figure.
pub(crate) fn targets(report: &Report) -> String {
    let mut text = "| Target | Setting | Wanted | Measured | |\n|---|---|--:|--:|---|\n".to_owned();
    for Target { what, setting, wanted, seen, met, .. } in report.targets.iter().filter(|target| target.promised()) {
        let wanted = match wanted {
            Bound::AtLeast(least) => format!("≥ {}", bound(*least)),
            Bound::AtMost(most) => format!("≤ {}", bound(*most)),
            Bound::Told => continue,
        };
        let verdict = if *met { "met" } else { "**not met**" };
        let _ = writeln!(text, "| {what} | {} | {wanted} | {} | {verdict} |", in_words(*setting), figure(*seen));
    }
    text
}

fn in_words(setting: Option<Told>) -> String {
    setting.map(|setting| setting.to_string()).unwrap_or_default()
}

pub(crate) fn section(section: &Section) -> String {
    let setting = section.setting.map(|setting| format!(" ({setting})")).unwrap_or_default();
    let mut text = format!("**{}**{setting}\n\n", section.title);
    text += &if section.rows.iter().any(|row| row.speed.is_some()) {
        format!("| | {} a second | ratio | p50, ms | p99, ms |\n|---|--:|--:|--:|--:|\n", section.unit)
    } else {
        "| | round trips | WAL, B | heap, B | index, B | HOT | allocations | allocated, B |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|\n"
            .to_owned()
    };
    for row in &section.rows {
        text += &line(row);
    }
    text
}

fn line(Row { way, speed, footprint }: &Row) -> String {
    if let Some(speed) = speed {
        return format!(
            "| {way} | {} | {:.2} | {} | {} |\n",
            figure(speed.per_second),
            speed.ratio,
            figure(speed.p50_ms),
            figure(speed.p99_ms)
        );
    }
    let Some(footprint) = footprint else { return format!("| {way} |\n") };
    let or_none = |value: Option<f64>| value.map(figure).unwrap_or_default();
    format!(
        "| {way} | {} | {} | {} | {} | {} | {} | {} |\n",
        figure(footprint.round_trips),
        figure(footprint.wal_bytes),
        or_none(footprint.heap_bytes),
        or_none(footprint.index_bytes),
        footprint.hot.map(|share| format!("{:.0} %", share * 100.0)).unwrap_or_default(),
        figure(footprint.allocations),
        figure(footprint.allocated_bytes)
    )
}

/// As it was promised.
fn bound(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value}") }
}

/// Three digits, or all that stand before the point.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        small if small >= 1.0 || small == 0.0 => {
            format!("{value:.2}").trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        tiny if tiny >= 0.01 => format!("{value:.3}").trim_end_matches('0').to_owned(),
        _ => format!("{value:.5}").trim_end_matches('0').to_owned(),
    }
}
