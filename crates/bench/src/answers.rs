//! The questions with which the page begins, each with a chart or a table.

use std::fmt::Write as _;

use crate::alternatives::{BARE, library, redis, usual};
use crate::cases::{first_call, http, replay};
use crate::chart::{Chart, Group};
use crate::markdown::{figure, setting};
use crate::report::{Report, Row, Section, Speed};

pub(crate) struct Answer {
    pub(crate) question: &'static str,
    pub(crate) text: String,
    pub(crate) chart: Option<Chart>,
}

/// Of the figures that there are.
pub(crate) fn answers(report: &Report) -> Vec<Answer> {
    let p50 = |speed: &Speed| speed.p50_ms;
    let first = first_calls(report);
    let replays = of(report, "replay", |section| section.title == replay::title(replay::CLIENTS));
    let growth = of(report, "growth", |_| true);
    let storms = |section: &Section| section.title.starts_with("Other keys beside");
    let storms = [of(report, "storm", storms), of(report, "http", storms)].concat();
    let marks: Vec<_> = of(report, "marks", |_| true).into_iter().take(1).collect();
    let requests = of(report, "http", |section| !section.title.starts_with("Other keys beside"));
    let citus = of(report, "citus", |section| section.title.contains(", 32 shards"));
    let titled = |question, text: String, name, title: &str, groups: Vec<Group>| {
        let chart = Chart { name, title: title.to_owned(), groups };
        Answer { question, text, chart: Some(chart) }
    };
    let mut answers = vec![
        titled(
            "How much latency does a protected call add?",
            format!(
                "The median rises by {}. The claim and the completion are two round trips more than those of the bare \
                 transaction. With `RoundTrips::Fewest` a call waits for no more round trips than the bare \
                 transaction{}. In your own transaction, `pg_idempotency::commit` takes one more round trip than the \
                 COMMIT of sqlx, which was measured.",
                added(&first, BARE, library::NAME),
                Some(added(&first, BARE, library::FEWEST))
                    .filter(|added| !added.is_empty())
                    .map(|added| format!(", and its median rises by {added}"))
                    .unwrap_or_default(),
            ),
            "latency",
            "Median time of a first call, ms (8 clients, 300 B of response)",
            groups(&first, &[BARE, usual::NAME, redis::NAME, library::NAME, library::FEWEST], place, p50),
        ),
        Answer {
            question: "How does it compare with hand-written code and with Redis?",
            text: comparison(&first, &replays),
            chart: None,
        },
        titled(
            "What does a replay cost?",
            "By default a replay is a transaction of its own: four round trips. With `RoundTrips::SelectFirst` it is one \
             select, without a transaction."
                .to_owned(),
            "replay",
            // Rates: where clients and server share saturated cores, the median of these short calls says little.
            "Replays a second (8 clients, one hot key, 300 B)",
            groups(
                &replays,
                &[replay::SELECT, usual::NAME, redis::NAME, library::NAME, library::SELECT_FIRST],
                place,
                |speed| speed.per_second,
            ),
        ),
        titled(
            "How does it grow?",
            grown(&growth),
            "growth",
            "Median time of a call, ms, by the size of the table (8 clients)",
            groups(&growth, &[], |section| section.unit.clone(), p50),
        ),
        titled(
            "What does a storm on one key do to other keys?",
            {
                let added = report.figures.iter().filter(|figure| figure.what.contains("adds to other keys' p99"));
                let most = added.fold(0.0, |most: f64, figure| figure.value.max(most));
                format!(
                    "Many clients request one key at once. It adds at most {} ms to the 99th percentile of the others.",
                    figure(most)
                )
            },
            "storm",
            "99th percentile of the other keys' first calls, ms",
            groups(&storms, &[], of_storm, |speed| speed.p99_ms),
        ),
        titled(
            "What does a batch of marks save?",
            "A consumer can mark up to 100 keys in one statement.".to_owned(),
            "marks",
            "Marks a second, by the number of keys in a call (8 clients)",
            groups(&marks, &[], place, |speed| speed.per_second),
        ),
        titled(
            "What does the HTTP layer cost?",
            format!(
                "The bare handler begins, inserts and commits. Through the layer, the median of a first request rises by {}.",
                added(&requests, http::BARE, http::FIRST_CALL)
            ),
            "http",
            "Median time of a request, ms (8 clients, pool of 10)",
            groups(&requests, &[], place, p50),
        ),
    ];
    let of_plain = citus.iter().filter_map(|section| {
        let ratio = section.rows.get(1)?.speed.as_ref()?.ratio;
        Some((section.title.replacen(", 32 shards", "", 1), ratio))
    });
    let mut bars: Vec<_> = of_plain.collect();
    if !bars.is_empty() {
        bars.insert(0, ("a plain table".to_owned(), 1.0));
    }
    answers.push(titled(
        "What does Citus cost?",
        "Each statement goes over the coordinator to a worker.".to_owned(),
        "citus",
        "Rate on Citus with 32 shards, divided by that of a plain table",
        vec![Group { title: "of the rate of a plain table".to_owned(), bars }],
    ));
    let shows = |chart: &Chart| chart.groups.iter().any(|group| !group.bars.is_empty());
    answers.retain(|answer| answer.chart.as_ref().map_or(!answer.text.is_empty(), shows));
    answers
}

/// With durable commits, the closest server first.
fn of<'r>(report: &'r Report, case: &str, wanted: impl Fn(&Section) -> bool) -> Vec<&'r Section> {
    let durable = |section: &&Section| section.setting.is_none_or(|setting| setting.synchronous_commit);
    let has_speeds = |section: &&Section| section.rows.iter().any(|row| row.speed.is_some());
    let sections = report.sections.iter().filter(|section| section.case == case && wanted(section));
    sections.filter(durable).filter(has_speeds).collect()
}

fn p50_of(section: &Section, way: &str) -> Option<f64> {
    Some(section.rows.iter().find(|row| row.way == way)?.speed.as_ref()?.p50_ms)
}

/// By how much the median time of this way is above that of the bare one.
fn added(sections: &[&Section], bare: &str, way: &str) -> String {
    let of_section = |section: &&Section| {
        let added = p50_of(section, way)? - p50_of(section, bare)?;
        let place = place(section);
        let place = if section.setting.is_some_and(|setting| setting.rtt_ms.is_some()) {
            format!("at {place}")
        } else {
            format!("on a {place}")
        };
        Some(format!("{} ms {place}", figure(added)))
    };
    sections.iter().filter_map(of_section).collect::<Vec<_>>().join(", ")
}

/// Of the medians, which the chart shows.
fn grown(growth: &[&Section]) -> String {
    let of = |unit: &str| {
        let section = growth.iter().find(|section| section.unit == unit)?;
        Some(figure(p50_of(section, "10000000 records")? / p50_of(section, "10000 records")?))
    };
    match (of("first calls"), of("replays")) {
        (Some(first), Some(replays)) => format!(
            "On 10 million records the median of a first call is {first} times that on 10 thousand, and the median of a \
             replay {replays} times."
        ),
        _ => String::new(),
    }
}

fn first_calls(report: &Report) -> Vec<&Section> {
    let title = first_call::title(first_call::SIZES[0].1, first_call::CLIENTS[0]);
    of(report, "first_call", |section| section.title == title)
}

/// A group for each section, of the ways that it has; all of them if none is named.
fn groups(sections: &[&Section], ways: &[&str], title: fn(&Section) -> String, value: fn(&Speed) -> f64) -> Vec<Group> {
    let bar = |row: &Row| Some((row.way.clone(), value(row.speed.as_ref()?)));
    let of_section = |section: &&Section| {
        let rows = section.rows.iter();
        let bars = if ways.is_empty() {
            rows.filter_map(bar).collect()
        } else {
            ways.iter().filter_map(|way| bar(section.rows.iter().find(|row| row.way == *way)?)).collect()
        };
        Group { title: title(section), bars }
    };
    sections.iter().map(of_section).collect()
}

fn place(section: &Section) -> String {
    setting(section.setting)
}

fn of_storm(section: &Section) -> String {
    let storm = section.title.trim_start_matches("Other keys beside ");
    if section.case == "http" { format!("{storm}, over HTTP") } else { storm.to_owned() }
}

/// What each alternative costs and promises.
fn comparison(first: &[&Section], replays: &[&Section]) -> String {
    let crashes = [
        (BARE, "performs the effect again"),
        (usual::NAME, "performs it once: the crash rolled back effect and key"),
        (redis::NAME, "**performs the effect again**, when the lock has expired"),
        (library::NAME, "performs it once: the crash rolled back effect and key"),
        (library::FEWEST, "the same"),
        (library::SELECT_FIRST, "the same"),
    ];
    let places = |sections: &[&Section], what: &str| {
        let column = |section: &&Section| format!(" {what}, {} |", place(section));
        sections.iter().map(column).collect::<String>()
    };
    let speed = |section: &Section, way: &str| section.rows.iter().find(|row| row.way == way)?.speed.clone();
    if first.is_empty() || replays.is_empty() {
        return String::new();
    }
    // Farther away, all rates are those of the network.
    let (first, replays) = (&first[..first.len().min(2)], &replays[..replays.len().min(2)]);
    let columns = format!("{}{}", places(first, "first calls a second"), places(replays, "replays a second"));
    let mut text = format!(
        "| |{columns} after a crash between the effect and its answer, a retry |\n|---|{}---|\n",
        "--:|".repeat(first.len() + replays.len())
    );
    for (way, crash) in crashes {
        let cells: String = first
            .iter()
            .chain(replays)
            .map(|section| speed(section, way).map(|speed| figure(speed.per_second)).unwrap_or_default())
            .map(|cell| format!(" {cell} |"))
            .collect();
        if cells.contains(|c: char| c.is_ascii_digit()) {
            let _ = writeln!(text, "| {way} |{cells} {crash} |");
        }
    }
    text + "\nThe usual hand-written code has no retention, no fence and no wait with a limit."
}
