//! The report for people.

use std::fmt::Write as _;

use crate::cases::CASES;
use crate::chart;
use crate::report::{Report, Row, Section};
use crate::target::{Bound, Target};

pub(crate) fn document(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "# Performance\n\n\
         Made by `{}` on {}; the figures are in [figures.json](performance/figures.json). The alternatives of a section took \
         turns in one run, A B C A B C …; rates are medians of the rounds, ratios are medians of each round's ratio to the \
         first line. Absolute figures are this machine's: {}, {} cores, PostgreSQL {}, fsync on, the client on the same \
         cores. Load average before the run {:.2}, in its last minute {:.2}.\n\n## Targets\n\n{}\n",
        report.command,
        machine.day,
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
            let _ = writeln!(text, "![{}](performance/{name})\n", case.title);
        }
        for section in sections {
            let _ = writeln!(text, "{}", self::section(section));
        }
    }
    text
}

pub(crate) fn targets(report: &Report) -> String {
    let mut text = "| Target | Wanted | Seen | |\n|---|--:|--:|---|\n".to_owned();
    for target in &report.targets {
        let Target { what, setting, wanted, seen, met } = target;
        let setting = setting.map(|setting| format!(" ({setting})")).unwrap_or_default();
        let (wanted, verdict) = match wanted {
            Bound::AtLeast(least) => (format!("≥ {}", figure(*least)), if *met { "met" } else { "**not met**" }),
            Bound::AtMost(most) => (format!("≤ {}", figure(*most)), if *met { "met" } else { "**not met**" }),
            Bound::Told => (String::new(), ""),
        };
        let _ = writeln!(text, "| {what}{setting} | {wanted} | {} | {verdict} |", figure(*seen));
    }
    text
}

pub(crate) fn section(section: &Section) -> String {
    let setting = section.setting.map(|setting| format!(", {setting}")).unwrap_or_default();
    let mut text = format!("**{}**{setting}\n\n", section.title);
    text += if section.rows.iter().any(|row| row.speed.is_some()) {
        "| | per second | of the first | p50, ms | p99, ms |\n|---|--:|--:|--:|--:|\n"
    } else {
        "| | round trips | WAL, B | heap, B | index, B | HOT | allocations | allocated, B |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|\n"
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
