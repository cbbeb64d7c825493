//! Curves, as SVG that needs no other program and is legible on light and dark pages.

use std::fmt::Write as _;

use crate::results::figure;

const WIDTH: f64 = 800.0;
const EDGE: f64 = 16.0;
const LINE: f64 = 24.0;
/// The height of the field of curves, its left edge and its width.
const FIELD: f64 = 260.0;
const LEFT: f64 = 76.0;
const ACROSS: f64 = 690.0;

/// Curves over labelled positions, on a logarithmic scale.
pub(crate) struct Chart {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) labels: Vec<String>,
    pub(crate) curves: Vec<Curve>,
}

pub(crate) struct Curve {
    pub(crate) title: String,
    pub(crate) values: Vec<f64>,
}

impl Chart {
    pub(crate) fn svg(&self) -> String {
        let (height, drawn) = drawing(&self.labels, &self.curves);
        // The background is opaque, because a page can be dark although the browser's preference is light.
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"15\">\n\
             <style>text {{ fill: #1f2328 }} .page {{ fill: #ffffff }} .grid {{ stroke: #d0d7de }} \
             @media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} .page {{ fill: #0d1117 }} \
             .grid {{ stroke: #30363d }} }}</style>\n\
             <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n\
             <text x=\"{EDGE}\" y=\"{}\" font-weight=\"bold\">{}</text>\n{drawn}</svg>\n",
            EDGE + LINE / 2.0,
            escaped(self.title),
        )
    }
}

/// The height, and the elements.
fn drawing(labels: &[String], curves: &[Curve]) -> (f64, String) {
    let mut svg = String::new();
    let values = || curves.iter().flat_map(|curve| &curve.values).map(|value| value.ln());
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
    let (least, most) = (least - 0.1, most + 0.1);
    let top = EDGE + LINE * (2.5 + curves.len() as f64);
    let x = |at: usize| LEFT + ACROSS * (at as f64 + 0.5) / labels.len() as f64;
    let y = |value: f64| top + FIELD * (most - value.ln()) / (most - least);
    for (at, curve) in curves.iter().enumerate() {
        let y = EDGE + LINE * (at as f64 + 1.7);
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{}\" width=\"28\" height=\"4\" fill=\"{}\"/><text x=\"{}\" y=\"{y}\">{}</text>",
            y - 7.0,
            colour(&curve.title),
            LEFT + 36.0,
            escaped(&curve.title),
        );
    }
    for value in (-3..8).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power))) {
        if (least..most).contains(&value.ln()) {
            let y = y(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT + ACROSS,
                LEFT - 8.0,
                y + 5.0,
                figure(value),
            );
        }
    }
    // There is room for ten labels.
    for (at, label) in labels.iter().enumerate().filter(|(at, _)| (at + 1) % labels.len().div_ceil(10) == 0) {
        let y = top + FIELD + LINE;
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", x(at), escaped(label));
    }
    for curve in curves {
        let point = |(at, value): (usize, &f64)| format!("{:.1},{:.1}", x(at), y(*value));
        let points: Vec<_> = curve.values.iter().enumerate().map(point).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"3\" stroke-linejoin=\"round\"/>",
            points.join(" "),
            colour(&curve.title),
        );
    }
    (top + FIELD + LINE + EDGE, svg)
}

/// The same kind of alternative has the same colour in all charts.
fn colour(way: &str) -> &'static str {
    match way {
        _ if way.contains("bare") => "#8c959f",
        _ if way.contains("hand") => "#c9a227",
        _ if way.contains("99th") => "#b5523b",
        _ if way.contains("select first") => "#4c8fbd",
        _ if way.contains("fewest round trips") => "#8a6fb0",
        _ => "#3b8a63",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
