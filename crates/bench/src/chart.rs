//! Bars, as SVG that needs no other program.

use std::fmt::Write as _;

use crate::markdown::figure;
use crate::report::{Report, Section};

const LABELS: f64 = 330.0;
const BARS: f64 = 420.0;
const FIGURES: f64 = 110.0;
const LINE: f64 = 20.0;
/// Of the alternatives, in the order of their lines; distinct in grey too.
const COLOURS: [&str; 7] = ["#9aa0a6", "#5b8db8", "#c9a227", "#2f6f4f", "#b5523b", "#6b5b95", "#444444"];

/// A chart for each case that has speeds, and its file's name.
pub(crate) fn charts(report: &Report) -> Vec<(String, String)> {
    let mut cases: Vec<_> = report.sections.iter().map(|section| section.case).collect();
    cases.dedup();
    cases.into_iter().filter_map(|case| Some((name(report, case)?, chart(&speeds(report, case))))).collect()
}

pub(crate) fn name(report: &Report, case: &str) -> Option<String> {
    (!speeds(report, case).is_empty()).then(|| format!("{case}.svg"))
}

fn speeds<'r>(report: &'r Report, case: &str) -> Vec<&'r Section> {
    let of_case = report.sections.iter().filter(|section| section.case == case);
    of_case.filter(|section| section.rows.iter().any(|row| row.speed.is_some())).collect()
}

fn chart(sections: &[&Section]) -> String {
    let lines: usize = sections.iter().map(|section| section.rows.len() + 2).sum();
    let (width, height) = (LABELS + BARS + FIGURES, LINE * lines as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let mut y = LINE;
    for section in sections {
        let setting = section.setting.map(|setting| format!(" ({setting})")).unwrap_or_default();
        let title = escaped(&format!("{}{setting}, {} a second", section.title, section.unit));
        let _ = writeln!(svg, "<text x=\"4\" y=\"{y}\" font-weight=\"bold\">{title}</text>");
        let most = section
            .rows
            .iter()
            .filter_map(|row| row.speed.as_ref())
            .fold(1e-9, |most, speed| speed.per_second.max(most));
        for (at, (way, speed)) in
            section.rows.iter().filter_map(|row| Some((&row.way, row.speed.as_ref()?))).enumerate()
        {
            y += LINE;
            let length = BARS * speed.per_second / most;
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{}</text>\
                 <rect x=\"{LABELS}\" y=\"{}\" width=\"{length:.1}\" height=\"14\" fill=\"{}\"/>\
                 <text x=\"{:.1}\" y=\"{y}\">{} ({:.2})</text>",
                LABELS - 6.0,
                escaped(way),
                y - 11.0,
                COLOURS[at % COLOURS.len()],
                LABELS + length + 4.0,
                figure(speed.per_second),
                speed.ratio,
            );
        }
        y += 2.0 * LINE;
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
