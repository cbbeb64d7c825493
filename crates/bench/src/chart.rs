//! Bars, as SVG that needs no other program.

use std::fmt::Write as _;

use crate::markdown::figure;

const WIDTH: f64 = 800.0;
const EDGE: f64 = 16.0;
/// Enough for 35 characters; a longer name is set narrower.
const LABELS: f64 = 290.0;
const BARS: f64 = 410.0;
const LINE: f64 = 24.0;

/// All bars have one scale.
pub(crate) struct Chart {
    pub(crate) name: &'static str,
    pub(crate) title: String,
    pub(crate) groups: Vec<Group>,
}

pub(crate) struct Group {
    pub(crate) title: String,
    /// Of alternatives.
    pub(crate) bars: Vec<(String, f64)>,
}

impl Chart {
    pub(crate) fn svg(&self) -> String {
        let lines: usize = self.groups.iter().map(|group| group.bars.len() + 1).sum();
        let height = EDGE * 2.0 + LINE * (lines as f64 + 1.0) + 10.0 * self.groups.len() as f64;
        let bars = self.groups.iter().flat_map(|group| &group.bars);
        let most = bars.fold(f64::MIN_POSITIVE, |most, (_, value)| value.max(most));
        // Opaque, because a page can be dark although the browser's preference is light.
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"15\">\n\
             <style>text {{ fill: #1f2328 }} .page {{ fill: #ffffff }} @media (prefers-color-scheme: dark) {{ \
             text {{ fill: #e6edf3 }} .page {{ fill: #0d1117 }} }}</style>\n\
             <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n"
        );
        let mut y = EDGE + LINE / 2.0;
        let _ = writeln!(svg, "<text x=\"{EDGE}\" y=\"{y}\" font-weight=\"bold\">{}</text>", escaped(&self.title));
        for group in &self.groups {
            y += LINE + 10.0;
            let _ =
                writeln!(svg, "<text x=\"{EDGE}\" y=\"{y}\" font-style=\"italic\">{}</text>", escaped(&group.title));
            for (way, value) in &group.bars {
                y += LINE;
                let length = BARS * value / most;
                let narrow = if way.chars().count() > 35 {
                    format!(" textLength=\"{}\" lengthAdjust=\"spacingAndGlyphs\"", LABELS - 8.0 - EDGE)
                } else {
                    String::new()
                };
                let _ = writeln!(
                    svg,
                    "<text x=\"{}\" y=\"{y}\" text-anchor=\"end\"{narrow}>{}</text>\
                     <rect x=\"{LABELS}\" y=\"{}\" width=\"{length:.1}\" height=\"17\" fill=\"{}\"/>\
                     <text x=\"{:.1}\" y=\"{y}\">{}</text>",
                    LABELS - 8.0,
                    escaped(way),
                    y - 13.5,
                    colour(way),
                    LABELS + length + 6.0,
                    figure(*value),
                );
            }
        }
        svg + "</svg>\n"
    }
}

/// The same for the same kind of alternative in all charts.
fn colour(way: &str) -> &'static str {
    match way {
        _ if way.contains("bare") || way == "alone" => "#8c959f",
        _ if way.contains("by hand") || way.contains("hand-written") => "#c9a227",
        _ if way.contains("Redis") => "#b5523b",
        _ if way.contains("select first") => "#4c8fbd",
        _ if way.contains("fewest round trips") => "#8a6fb0",
        _ => "#3b8a63",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
