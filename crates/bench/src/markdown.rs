//! The report for people.

use std::fmt::Write as _;

use crate::answers::answers;
use crate::cases::CASES;
use crate::footprint::Footprint;
use crate::report::{Figure, Report, Row, Section};
use crate::setting::Told;
use crate::target::{Bound, TARGETS};

const WIDTH: usize = 120;

pub(crate) fn document(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "# Performance\n\n`{}` wrote these figures on {}, in {:.0} min, on {} cores that clients and server shared. \
         [figures.json]({}/figures.json) contains all of them. [Method](#method) describes the machine.\n",
        report.command, machine.day, report.minutes, machine.cores, report.page,
    );
    if let Some(note) = &report.note {
        let _ = writeln!(text, "\n{note}");
    }
    for answer in answers(report) {
        let _ = writeln!(text, "\n## {}", answer.question);
        if !answer.text.is_empty() {
            let _ = writeln!(text, "\n{}", answer.text);
        }
        if let Some(chart) = answer.chart {
            let _ = writeln!(text, "\n![{}]({}/{}.svg)", chart.title, report.page, chart.name);
        }
    }
    let _ = write!(
        text,
        "\n## Targets\n\n*Rate over that of X* means the rate divided by the rate of X. All targets are for 8 clients, and \
         apply within one run.\n\n{}\n\
         ## Method\n\n\
         The alternatives of a table took turns, A B C A B C …. A rate is the median of the rounds. A ratio is the \
         median of each round's ratio, so a machine that becomes slower affects all alternatives equally.\n\n\
         The absolute figures apply to this machine: {}, {} cores, PostgreSQL {} with fsync on and 128 MB of shared buffers. \
         The load average was {:.2} in the minute before the run, and {:.2} in its last minute.\n\n\
         The costs of one call were counted with one client. A proxy counted round trips, the server counted WAL and bytes, \
         and the allocator of the client's process counted allocations, including sqlx's. Heap and index are those of the keys' \
         table. HOT is the share of its updates that wrote no index.\n\n\
         A cell such as 4410 (1.72, 3.33) means 4410 a second, a median time of 1.72 ms, and a 99th percentile of 3.33 ms. \
         `synchronous_commit` is on where the column does not say off. Tables of other settings show rates only; figures.json has \
         their times.\n",
        targets(report),
        machine.processor,
        machine.cores,
        machine.postgres,
        machine.load[0],
        machine.load[1],
    );
    for skipped in &report.skipped {
        let _ = writeln!(text, "\nNot measured here: {skipped}.");
    }
    for case in CASES {
        let sections: Vec<_> = report.sections.iter().filter(|section| section.case == case.name).collect();
        if sections.is_empty() {
            continue;
        }
        let _ = writeln!(text, "\n## {}\n\n{}\n", case.title, case.about);
        text += &tables(&sections);
        let others = |figure: &&Figure| figure.case == case.name && !TARGETS.iter().any(|target| target.is_of(figure));
        text += &other_figures(&report.figures.iter().filter(others).collect::<Vec<_>>());
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

/// Every target of the cases that were run, beside its figure.
pub(crate) fn targets(report: &Report) -> String {
    let mut text = "| Target | Setting | Wanted | Measured | |\n|---|---|--:|--:|---|\n".to_owned();
    for target in TARGETS.iter().filter(|target| report.sections.iter().any(|section| section.case == target.case)) {
        let wanted = match target.wanted {
            Bound::AtLeast(least) => format!("≥ {least}"),
            Bound::AtMost(most) => format!("≤ {most}"),
        };
        let goal = target.goal.map(|goal| format!(" (goal {goal})")).unwrap_or_default();
        let figures: Vec<_> = report.figures.iter().filter(|figure| target.is_of(figure)).collect();
        for Figure { setting, value, .. } in &figures {
            let met = target.is_met(*value);
            let verdict = if met { "met" } else { "**not met**" };
            // A figure that misses its target by less than its digits show needs more digits.
            let shown = figure(*value);
            let shown = if met || !wanted.ends_with(&format!(" {shown}")) { shown } else { format!("{value:.4}") };
            let setting = self::setting(*setting);
            let _ = writeln!(text, "| {} | {setting} | {wanted}{goal} | {shown} | {verdict} |", target.what);
        }
        if figures.is_empty() {
            let _ = writeln!(text, "| {} | {} | {wanted}{goal} | | not measured |", target.what, target.place());
        }
    }
    text
}

pub(crate) fn setting(setting: Option<Told>) -> String {
    setting.map(|setting| setting.to_string()).unwrap_or_default()
}

/// A table for each title, with a column for each setting; and one for all sections without a setting.
pub(crate) fn tables(sections: &[&Section]) -> String {
    let mut text = String::new();
    let (counted, timed): (Vec<&Section>, Vec<&Section>) =
        sections.iter().partition(|section| section.rows.iter().all(|row| row.speed.is_none()));
    let (everywhere, mut timed): (Vec<&Section>, Vec<&Section>) =
        timed.into_iter().partition(|section| section.setting.is_none());
    for one in &everywhere {
        let ways = || one.rows.iter().map(|row| row.way.as_str());
        if one.case != everywhere[0].case || one.title == everywhere[0].title {
            let _ = writeln!(text, "| a second (p50, p99) |{}", cells(ways()));
            let _ = writeln!(text, "|---|{}", "--:|".repeat(one.rows.len()));
        }
        let _ = writeln!(text, "| {}, {} |{}", one.title, one.unit, cells(one.rows.iter().map(speed)));
    }
    if !everywhere.is_empty() {
        text.push('\n');
    }
    while let Some(first) = timed.first().copied() {
        let (of_unit, rest): (Vec<&Section>, Vec<&Section>) =
            timed.into_iter().partition(|section| section.unit == first.unit);
        timed = rest;
        let (main, others): (Vec<&Section>, Vec<&Section>) =
            of_unit.into_iter().partition(|section| section.title == first.title);
        let place = |section: &Section| setting(section.setting);
        text +=
            &side_by_side(&format!("{}: {} a second (p50, p99 in ms)", first.title, first.unit), &main, place, speed);
        let same_ways =
            |section: &&Section| section.rows.iter().all(|row| first.rows.iter().any(|of| of.way == row.way));
        if others.len() > 2 && others.iter().all(same_ways) {
            let place = |section: &Section| format!("{}, {}", section.title, setting(section.setting));
            text += &side_by_side(&format!("Other settings: {} a second", first.unit), &others, place, rate);
        } else {
            timed.splice(0..0, others);
        }
    }
    for section in counted {
        let on_disk =
            section.rows.iter().any(|row| row.footprint.is_some_and(|footprint| footprint.heap_bytes.is_some()));
        let columns: Vec<_> = COLUMNS.iter().filter(|column| on_disk || !column.on_disk).collect();
        let heads = cells(columns.iter().map(|column| column.head));
        let _ = writeln!(text, "**{}**\n\n| |{heads}\n|---|{}", section.title, "--:|".repeat(columns.len()));
        for row in &section.rows {
            let cell = |column: &&Column| row.footprint.as_ref().map(column.cell).unwrap_or_default();
            let _ = writeln!(text, "| {} |{}", row.way, cells(columns.iter().map(cell)));
        }
        text.push('\n');
    }
    text
}

fn cells(texts: impl Iterator<Item = impl AsRef<str>>) -> String {
    texts.map(|text| format!(" {} |", text.as_ref())).collect()
}

/// A line for each row of the first section, with a column for each section.
fn side_by_side(
    title: &str,
    sections: &[&Section],
    place: impl Fn(&Section) -> String,
    cell: impl Fn(&Row) -> String,
) -> String {
    let heads = cells(sections.iter().map(|section| place(section)));
    let mut text = format!("**{title}**\n\n| |{heads}\n|---|{}\n", "--:|".repeat(sections.len()));
    for row in sections.iter().take(1).flat_map(|section| &section.rows) {
        let of = |section: &&Section| section.rows.iter().find(|other| other.way == row.way).map(&cell);
        let _ = writeln!(text, "| {} |{}", row.way, cells(sections.iter().map(|one| of(one).unwrap_or_default())));
    }
    text.push('\n');
    text
}

fn rate(row: &Row) -> String {
    row.speed.as_ref().map(|speed| figure(speed.per_second)).unwrap_or_default()
}

fn speed(row: &Row) -> String {
    let Some(speed) = &row.speed else { return String::new() };
    format!("{} ({}, {})", figure(speed.per_second), figure(speed.p50_ms), figure(speed.p99_ms))
}

/// Of a table of what one call takes.
struct Column {
    head: &'static str,
    /// Left out where no row has it.
    on_disk: bool,
    cell: fn(&Footprint) -> String,
}

const COLUMNS: [Column; 7] = [
    Column { head: "round trips", on_disk: false, cell: |of| figure(of.round_trips) },
    Column { head: "WAL, B", on_disk: false, cell: |of| figure(of.wal_bytes) },
    Column { head: "heap, B", on_disk: true, cell: |of| of.heap_bytes.map(figure).unwrap_or_default() },
    Column { head: "index, B", on_disk: true, cell: |of| of.index_bytes.map(figure).unwrap_or_default() },
    Column {
        head: "HOT",
        on_disk: true,
        cell: |of| of.hot.map(|share| format!("{:.0} %", share * 100.0)).unwrap_or_default(),
    },
    Column { head: "allocations", on_disk: false, cell: |of| figure(of.allocations) },
    Column { head: "allocated, B", on_disk: false, cell: |of| figure(of.allocated_bytes) },
];

/// A line for each figure without a target, with a column for each setting.
fn other_figures(figures: &[&Figure]) -> String {
    let mut settings: Vec<Option<Told>> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for figure in figures {
        if !settings.contains(&figure.setting) {
            settings.push(figure.setting);
        }
        if !names.contains(&figure.what.as_str()) {
            names.push(&figure.what);
        }
    }
    if figures.is_empty() {
        return String::new();
    }
    let heads = cells(settings.iter().map(|of| setting(*of)));
    let mut text = format!("| Measured, without a target |{heads}\n|---|{}\n", "--:|".repeat(settings.len()));
    for name in names {
        let of = |setting: &Option<Told>| figures.iter().find(|one| one.what == name && one.setting == *setting);
        let values = cells(settings.iter().map(|setting| of(setting).map(|one| figure(one.value)).unwrap_or_default()));
        let _ = writeln!(text, "| {name} |{values}");
    }
    text
}

/// Three digits, or all that stand before the point.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        small if small >= 1.0 || small == 0.0 => {
            format!("{value:.2}").trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        tiny if tiny >= 0.01 => format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned(),
        _ => format!("{value:.5}").trim_end_matches('0').to_owned(),
    }
}
