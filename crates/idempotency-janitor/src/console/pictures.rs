//! The pictures of the pages, as SVG in the page. The Content-Security-Policy allows neither a script nor an inline
//! style, so the style sheet has the colours. The facts of each picture are also in the text of the page.

use std::fmt::Write as _;

use chrono::{DateTime, Utc};
use maud::{Markup, html};
use pg_idempotency::operator::Shown;

use super::samples::SHOWN;
use super::text::{age, span, visible};

/// The height of an event, with its name above its line.
const ROW: usize = 40;
/// The greatest number of steps in a timeline. A picture with more steps would not help.
const STEPS: usize = 20;
/// How much of the name of a step fits on a narrow screen, in characters.
const NAME: usize = 12;

struct Event {
    name: String,
    at: DateTime<Utc>,
    /// The class of the event in the style sheet.
    kind: &'static str,
}

impl Event {
    fn in_words(&self, now: DateTime<Utc>) -> String {
        match (self.at - now).to_std() {
            Ok(left) => format!("{}, in {}", self.name, span(left)),
            Err(_) => format!("{}, {} ago", self.name, span(age(self.at))),
        }
    }
}

/// Draws the past of a key, and the times that are still to come.
pub(super) fn timeline(shown: &Shown) -> Markup {
    let now = Utc::now();
    let (events, left_out) = events(shown);
    let first = events.iter().map(|event| event.at).fold(now, Ord::min);
    let last = events.iter().map(|event| event.at).fold(now, Ord::max);
    // A retention is often much longer than the past, so each side of the present has its own scale.
    let present = match (first < now, last > now) {
        (true, true) => 60.0,
        (false, true) => 0.0,
        (_, false) => 100.0,
    };
    let seconds = |from: DateTime<Utc>, to: DateTime<Utc>| (to - from).num_milliseconds() as f64;
    let place = |at: DateTime<Utc>| {
        let share = if at <= now && first < now {
            present * seconds(first, at) / seconds(first, now)
        } else if at > now {
            present + (100.0 - present) * seconds(now, at) / seconds(now, last)
        } else {
            present
        };
        // Room for half of a circle at both ends.
        format!("{:.2}%", 2.0 + 0.96 * share)
    };
    let words: Vec<_> = events.iter().map(|event| event.in_words(now)).collect();
    let height = events.len() * ROW;
    let side = if present > 50.0 { "end" } else { "start" };
    html! {
        svg.timeline role="img" aria-labelledby="timeline-title timeline-text" width="100%" height=(height + 24) {
            title id="timeline-title" { "The times of this key" }
            desc id="timeline-text" { (words.join("; ")) }
            line.now x1=(place(now)) x2=(place(now)) y1="0" y2=(height + 4) {}
            @for (row, (event, words)) in events.iter().zip(&words).enumerate() {
                text x="0" y=(row * ROW + 16) { (words) }
                line.track x1="2%" x2="98%" y1=(row * ROW + 28) y2=(row * ROW + 28) {}
                circle class=(event.kind) cx=(place(event.at)) cy=(row * ROW + 28) r="6" {}
            }
            text.soft x=(place(now)) y=(height + 18) text-anchor=(side) { "now" }
        }
        p.soft {
            "Each side of now has its own scale."
            @if left_out > 0 { " The picture leaves out the " (left_out) " earliest steps." }
        }
    }
}

/// The events, the earliest first, and the number of steps that were left out.
fn events(shown: &Shown) -> (Vec<Event>, usize) {
    let mut events = Vec::new();
    let mut add = |name: String, at: Option<DateTime<Utc>>, kind| {
        events.extend(at.map(|at| Event { name, at, kind }));
    };
    add("claimed".to_owned(), Some(shown.claimed_at), "done");
    let left_out = shown.steps.len().saturating_sub(STEPS);
    for step in &shown.steps[left_out..] {
        let (doubt, kind) = if step.in_doubt { (" in doubt", "doubt") } else { ("", "done") };
        add(format!("step {}{doubt}", named(&step.name)), step.at, kind);
    }
    for probes in &shown.probes {
        let finding = probes.finding.map(|finding| format!(": {}", finding.as_str().replace('_', " ")));
        let of = probes.step.as_deref().map(|step| format!(" of {}", named(step))).unwrap_or_default();
        add(format!("probe{of}{}", finding.unwrap_or_default()), probes.at, "done");
        add(format!("next probe{of}"), probes.next, "next");
    }
    if shown.completed_at.is_none() {
        let (name, kind) = if shown.lease_left.is_some() { ("lease ends", "next") } else { ("lease lapsed", "doubt") };
        add(name.to_owned(), shown.lease_until, kind);
    }
    add("completed".to_owned(), shown.completed_at, "done");
    let expires = if shown.retention_left.is_zero() { "expired" } else { "expires" };
    add(expires.to_owned(), Some(shown.expires_at), "end");
    events.sort_by_key(|event| event.at);
    (events, left_out)
}

fn named(step: &str) -> String {
    let mut name = String::new();
    for character in step.chars() {
        // An escape sequence is never cut in two.
        let seen = visible(character.encode_utf8(&mut [0; 4]));
        if name.chars().count() + seen.chars().count() > NAME {
            return name + "…";
        }
        name.push_str(&seen);
    }
    name
}

/// The size of a chart, which the style sheet stretches.
const WIDTH: f64 = 240.0;
const HEIGHT: f64 = 32.0;

/// Draws the values of the last hour as a line, on a scale that begins at zero. A sample that is missing leaves a gap.
pub(super) fn chart(name: &str, samples: &[(DateTime<Utc>, Option<f64>)]) -> Markup {
    let now = Utc::now();
    let most = samples.iter().filter_map(|(_, value)| *value).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let mut path = String::new();
    let mut pen_is_up = true;
    for (at, value) in samples {
        let Some(value) = value else {
            pen_is_up = true;
            continue;
        };
        let ago = (now - at).num_milliseconds() as f64 / SHOWN.as_millis() as f64;
        let (x, y) = (WIDTH * (1.0 - ago.clamp(0.0, 1.0)), 2.0 + (HEIGHT - 4.0) * (1.0 - value / most));
        // A line of length zero shows a single sample as a point.
        let point = if pen_is_up { format!("M{x:.1} {y:.1}h0") } else { format!("L{x:.1} {y:.1}") };
        let _ = write!(path, "{point}");
        pen_is_up = false;
    }
    html! {
        svg.chart role="img" aria-label=(name) viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) preserveAspectRatio="none" {
            path d=(path) {}
        }
    }
}
