//! The report for programs, `figures.json`: one line for each figure, with four digits, so that a new run is a short
//! diff.

use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;

use crate::report::{Figure, Machine, Report, Section};

pub(crate) fn in_lines(report: &Report) -> serde_json::Result<String> {
    let machine = serde_json::to_string(&report.machine)?;
    let mut run = json!({"command": report.command, "minutes": rounded(report.minutes), "skipped": report.skipped});
    if let Some(note) = &report.note {
        run["note"] = json!(note);
    }
    let sections = report.sections.iter().map(section).collect::<serde_json::Result<Vec<_>>>()?.join(",\n");
    let figures = report.figures.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<_>>>()?.join(",\n");
    Ok(format!(
        "{{\"run\": {run},\n\"machine\": {machine},\n\"sections\": [\n{sections}\n],\n\"figures\": [\n{figures}\n]}}\n"
    ))
}

/// What [`in_lines`] wrote.
pub(crate) fn report(text: &str, page: &'static str) -> serde_json::Result<Report> {
    #[derive(Deserialize)]
    struct Run {
        command: String,
        minutes: f64,
        skipped: Vec<String>,
        note: Option<String>,
    }
    #[derive(Deserialize)]
    struct Stored {
        run: Run,
        machine: Machine,
        sections: Vec<Section>,
        figures: Vec<Figure>,
    }
    let Stored { run, machine, sections, figures } = serde_json::from_str(text)?;
    let Run { command, minutes, skipped, note } = run;
    Ok(Report { command, page, machine, minutes, sections, figures, skipped, note })
}

fn section(Section { case, title, setting, unit, rows }: &Section) -> serde_json::Result<String> {
    let head = json!({"case": case, "title": title, "setting": setting, "unit": unit}).to_string();
    let rows = rows.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<_>>>()?;
    Ok(format!("{}, \"rows\": [\n{}\n]}}", head.trim_end_matches('}'), rows.join(",\n")))
}

pub(crate) fn short<S: Serializer>(figure: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    rounded(*figure).serialize(serializer)
}

pub(crate) fn both_short<S: Serializer>(figures: &[f64; 2], serializer: S) -> Result<S::Ok, S::Error> {
    figures.map(rounded).serialize(serializer)
}

pub(crate) fn short_or_none<S: Serializer>(figure: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    figure.map(rounded).serialize(serializer)
}

/// To four digits, which is more than a second run repeats.
fn rounded(figure: f64) -> f64 {
    format!("{figure:.3e}").parse().unwrap_or(figure)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::footprint::Footprint;
    use crate::report::{Row, Speed};

    #[test]
    fn each_figure_is_one_line_of_a_json_document_that_can_be_read_again() {
        let speed =
            Speed { per_second: 12284.27, range: [9946.99, 12805.9], ratio: 1.0, p50_ms: 0.620998, p99_ms: 1.47 };
        let footprint = Footprint { round_trips: 2.0, hot: Some(0.98765), ..Footprint::default() };
        let section = |rows| Section {
            case: "case".to_owned(),
            title: "title".to_owned(),
            setting: None,
            unit: "calls".to_owned(),
            rows,
        };
        let report = Report {
            command: "script/bench".to_owned(),
            page: "performance",
            machine: Machine {
                processor: "one".to_owned(),
                cores: 2,
                postgres: "15".to_owned(),
                load: [1.0, 2.0],
                day: "2026-11-21".to_owned(),
            },
            minutes: 26.06,
            sections: vec![
                section(vec![Row { way: "fast".to_owned(), speed: Some(speed), footprint: None }]),
                section(vec![Row { way: "small".to_owned(), speed: None, footprint: Some(footprint) }]),
            ],
            figures: vec![Figure { case: "case".to_owned(), what: "ratio".to_owned(), setting: None, value: 0.25 }],
            skipped: Vec::new(),
            note: None,
        };
        let text = in_lines(&report).expect("JSON");
        let fast =
            r#"{"way":"fast","per_second":12280.0,"range":[9947.0,12810.0],"ratio":1.0,"p50_ms":0.621,"p99_ms":1.47}"#;
        assert!(text.lines().any(|line| line == fast), "{text}");
        let parsed: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(parsed["sections"][0]["rows"][0]["per_second"], 12280.0);
        assert_eq!(parsed["sections"][1]["rows"][0]["hot"], 0.9877);
        assert_eq!(parsed["machine"]["cores"], 2);
        let read = super::report(&text, "performance").expect("the same report");
        assert_eq!(in_lines(&read).expect("JSON"), text, "what is written can be read");
    }
}
