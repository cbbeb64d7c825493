//! The templates of the pages. `html!` escapes every value. Foreign text first goes through the module `text`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use maud::{DOCTYPE, Markup, html};
use pg_idempotency::operator::{Shown, ShownProbes, ShownStep, Stats, Warning};
use pg_idempotency::{Key, Mode};

use super::decisions::{Decisions, KEPT, Made};
use super::order::{Order, TOOK_EFFECT, decision};
use super::pictures::{chart, timeline};
use super::samples::Sample;
use super::text::{age, count, lines, shortened, shortened_after, span, time, visible};
use crate::keys::{names_in_doubt, probes_in_words, seen, waits_as};
use crate::settle::Agreed;
use crate::stats::size;

/// How many of the oldest keys the list shows. A person settles fewer keys than this at once.
pub(super) const LISTED: u32 = 100;
/// After this time, the server ends a search. A search by the beginning of the value reads an index. A search by
/// a scope or an operation alone may read the whole table.
pub(super) const SEARCH_TIME: Duration = Duration::from_secs(5);
/// The time between two refreshes of a page in seconds, if a person has asked for refreshes.
pub(super) const REFRESH_SECONDS: &str = "30";
/// The query of a page that refreshes.
pub(super) const REFRESHING: &str = "refresh=30";

fn page(title: &str, content: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) " · idempotency" }
                link rel="stylesheet" href="/style.css";
            }
            body {
                a.skip href="#content" { "Skip to the content" }
                nav aria-label="Pages" {
                    a href="/" { "Overview" }
                    a href="/waiting" { "Waiting for a person" }
                    a href="/find" { "Look up a key" }
                    a href="/log" { "Log" }
                }
                main id="content" { h1 { (title) } (content) }
            }
        }
    }
}

/// The page of an error, with the link of the key that the error concerns.
pub(super) fn refused(status: StatusCode, why: &str, link: Option<&str>) -> Markup {
    page(
        status.canonical_reason().unwrap_or("Error"),
        &html! {
            p.alert role="alert" { (lines(why)) }
            @if let Some(link) = link { p { a href={ "/key/" (link) } { "The key as it is now" } } }
        },
    )
}

/// The time of the page, and the link that starts or stops its refresh.
fn refresh(path: &str, again: bool) -> Markup {
    html! {
        p.soft {
            "As of " (time(Utc::now())) ". "
            @if again {
                "This page refreshes every " (REFRESH_SECONDS) " s. " a href=(path) { "Stop refreshing" }
            } @else {
                a href={ (path) "?" (REFRESHING) } { "Refresh every " (REFRESH_SECONDS) " s" }
            }
        }
    }
}

/// A table. Each cell names its column, because a narrow screen does not show the head.
fn table(columns: &[&str], rows: impl Iterator<Item = Vec<Markup>>) -> Markup {
    html! {
        table {
            thead { tr { @for column in columns { th scope="col" { (column) } } } }
            tbody {
                @for row in rows {
                    tr { @for (column, cell) in columns.iter().zip(row) { td data-label=(column) { div { (cell) } } } }
                }
            }
        }
    }
}

/// The overview. Parts that need a person come first, and mere information comes last. `waiting` is `None` if the table
/// could not be read in time.
pub(super) fn overview(
    waiting: Option<&[Shown]>,
    stats: &Stats,
    warnings: &[Warning],
    samples: &(Duration, Vec<Sample>),
    again: bool,
    read_only: bool,
) -> Markup {
    let well = warnings.is_empty() && waiting.is_some_and(<[_]>::is_empty);
    let about = if stats.exact { "" } else { "~" };
    let mut groups: BTreeMap<_, u64> = BTreeMap::new();
    for group in &stats.groups {
        *groups.entry([group.mode.clone(), group.state.to_string()]).or_default() += group.records;
    }
    let rows = groups
        .iter()
        .map(|([mode, state], records)| vec![html! { (mode) }, html! { (state) }, html! { (about) (count(*records)) }]);
    page(
        "Overview",
        &html! {
            (refresh("/", again))
            @if read_only { p { "This console is read-only." } }
            h2 { "Waiting for a person" }
            @match waiting {
                None => p.alert { "The table was not read in time. " a href="/waiting" { "List the keys that wait" } },
                Some([]) => p.good[well] { "No key waits." },
                Some(found @ [oldest, ..]) => p.alert {
                    @match found.len() {
                        1 => "1 key waits",
                        keys if keys > LISTED as usize => { "More than " (LISTED) " keys wait" },
                        keys => { (keys) " keys wait" },
                    }
                    "; the oldest was claimed " (span(age(oldest.claimed_at))) " ago. "
                    a href="/waiting" { "List the keys that wait" }
                },
            }
            @if let Some(found) = waiting {
                @let listed = &found[..found.len().min(LISTED as usize)];
                (first_to_expire(listed.iter().map(|shown| (None, shown)), listed.len() < found.len()))
            }
            h2 { "Health" }
            @if warnings.is_empty() { p.good[well] { "There are no warnings." } }
            @else { ul { @for warning in warnings { li.alert { (lines(&warning.to_string())) } } } }
            h2 { "The last hour" }
            (last_hour(samples))
            h2 { "Table" }
            dl {
                dt { "Records" } dd { (about) (count(stats.records)) @if !stats.exact { " (estimated from a sample)" } }
                dt { "Table" } dd { (size(stats.table_bytes)) }
                dt { "Indexes" } dd { (size(stats.index_bytes)) }
                dt { "Dead rows" } dd { (count(stats.dead_rows)) }
                dt { "Sweep" } dd {
                    @if let Some(oldest) = stats.oldest_expired { "An expired record has waited for " (span(oldest)) }
                    @else { "No expired record waits" }
                }
            }
            h2 { "Records by mode and state" }
            (table(&["Mode", "State", "Records"], rows))
        },
    )
}

/// A small chart for each state, and for the lag of the sweep.
fn last_hour((every, samples): &(Duration, Vec<Sample>)) -> Markup {
    let Some((since, _)) = samples.first() else { return Markup::default() };
    let contents = || samples.iter().filter_map(|(_, content)| content.as_ref());
    let about = if contents().all(|content| content.exact) { "" } else { "~" };
    let states: BTreeSet<_> = contents().flat_map(|content| content.states.keys().copied()).collect();
    let mut rows = Vec::new();
    for state in states {
        let values = samples.iter().map(|(at, content)| {
            (*at, content.as_ref().map(|content| content.states.get(&state).copied().unwrap_or_default()))
        });
        let values: Vec<_> = values.collect();
        let drawn: Vec<_> = values.iter().map(|(at, value)| (*at, value.map(|value| value as f64))).collect();
        rows.push(charted(&state.to_string(), &values, &drawn, |value| format!("{about}{}", count(value))));
    }
    let lags: Vec<_> = samples.iter().map(|(at, content)| (*at, content.as_ref().map(|content| content.lag))).collect();
    let drawn: Vec<_> = lags.iter().map(|(at, lag)| (*at, lag.map(|lag| lag.as_secs_f64()))).collect();
    rows.push(charted("Lag of the sweep", &lags, &drawn, span));
    let missing = samples.len() - contents().count();
    html! {
        (table(&["State", "Last sample", "Lowest", "Highest", "Last hour"], rows.into_iter()))
        p.soft {
            "Sampled by this console every " (span(*every)) " since " (time(*since)) ". "
            "The scale of each chart begins at zero."
            @if missing > 0 { " The database did not answer " (missing) " of " (samples.len()) " times." }
        }
    }
}

/// A row of the charts. `drawn` contains the values as the chart draws them.
fn charted<T: Copy + Ord>(
    name: &str,
    values: &[(DateTime<Utc>, Option<T>)],
    drawn: &[(DateTime<Utc>, Option<f64>)],
    in_text: impl Fn(T) -> String,
) -> Vec<Markup> {
    let known = || values.iter().filter_map(|(_, value)| *value);
    let in_text = |value: Option<T>| value.map_or_else(|| "unknown".to_owned(), &in_text);
    let (last, low, high) = (values.last().and_then(|(_, value)| *value), known().min(), known().max());
    let alternative = format!("{name} in the last hour: from {} to {}", in_text(low), in_text(high));
    vec![
        html! { (name) },
        html! { (in_text(last)) },
        html! { (in_text(low)) },
        html! { (in_text(high)) },
        chart(&alternative, drawn),
    ]
}

/// The page of the keys that wait for a person. `found` contains the records with their links.
pub(super) fn waiting(found: &[(String, Shown)], most: Option<NonZeroU32>, again: bool) -> Markup {
    let columns = ["Claimed", "Expires", "Scope", "Operation", "Key", "State", "Attempt", "Look up", "Last error"];
    let listed = found.len().min(LISTED as usize);
    page(
        "Waiting for a person",
        &html! {
            (refresh("/waiting", again))
            @if found.is_empty() { p.good { "No key waits." } } @else {
                p {
                    (listed) " keys, the oldest claim first."
                    @if listed < found.len() { " There are more: settle these, or use the command line." }
                }
                (first_to_expire(
                    found[..listed].iter().map(|(link, shown)| (Some(&**link), shown)),
                    listed < found.len(),
                ))
                (table(&columns, found[..listed].iter().map(|found| row(found, most))))
            }
        },
    )
}

/// Shows which key expires first, and when. A person has to settle this key before that time. A key that is not listed
/// may expire earlier.
fn first_to_expire<'a>(found: impl Iterator<Item = (Option<&'a str>, &'a Shown)>, more: bool) -> Markup {
    let Some((link, first)) = found.min_by_key(|(_, shown)| shown.expires_at) else { return Markup::default() };
    let name = html! { bdi { (visible(first.key.operation())) " " (shortened(first.key.value())) } };
    html! {
        p {
            @if more { "Of these " (LISTED) ", the first to expire is " } @else { "The first to expire is " }
            @if let Some(link) = link { a href={ "/key/" (link) } { (name) } } @else { (name) }
            @if first.retention_left.is_zero() { ", which has expired" }
            @else { ", in " (span(first.retention_left)) ", at " (time(first.expires_at)) }
            ". After that, a repeat is performed."
        }
    }
}

/// The result of a search.
pub(super) enum Found {
    All(Vec<(String, Shown)>),
    /// The server has ended the search.
    NotInTime,
}

/// The page that looks up one key, or lists the keys whose values begin alike.
pub(super) fn find(parts: [&str; 3], found: Option<(&Found, Option<NonZeroU32>)>) -> Markup {
    let fields = [("scope", "Scope"), ("operation", "Operation"), ("value", "Value, or its beginning")];
    page(
        "Look up a key",
        &html! {
            form method="post" action="/find" {
                @for ((name, label), part) in fields.into_iter().zip(parts) {
                    label { (label) input name=(name) value=(part) required maxlength="255" autocomplete="off"; }
                }
                p.buttons {
                    button { "Show the key" }
                    " "
                    button name="search" value="true" formnovalidate { "Search" }
                }
            }
            p.soft {
                "A search lists the keys whose values begin like this one. An empty field means any. A search without \
                 a scope or an operation may read much of the table, and is stopped after " (span(SEARCH_TIME)) "."
            }
            @if let Some((found, most)) = found { h2 { "Found" } (listed(found, most, parts[2])) }
        },
    )
}

fn listed(found: &Found, most: Option<NonZeroU32>, beginning: &str) -> Markup {
    match found {
        Found::NotInTime => html! {
            p.alert role="alert" {
                "The search was stopped after " (span(SEARCH_TIME)) ", so there may be such keys. A search by scope, \
                 operation and the beginning of the value takes no such time."
            }
        },
        Found::All(found) if found.is_empty() => html! { p role="status" { "There is no such key." } },
        Found::All(found) => {
            let listed = &found[..found.len().min(LISTED as usize)];
            let rows = listed.iter().map(|(link, shown)| {
                vec![
                    html! { bdi { (visible(shown.key.scope())) } },
                    html! { bdi { (visible(shown.key.operation())) } },
                    html! { a href={ "/key/" (link) } { bdi { (shortened_after(shown.key.value(), beginning)) } } },
                    html! { (waits_as(shown, most)) },
                    html! { (time(shown.claimed_at)) },
                    expires(shown),
                ]
            });
            html! {
                p role="status" {
                    @if listed.len() < found.len() {
                        "The first " (LISTED) " keys. There are more: give more of the value."
                    }
                    @else if listed.len() == 1 { "1 key." }
                    @else { (listed.len()) " keys." }
                }
                (table(&["Scope", "Operation", "Key", "State", "Claimed", "Expires"], rows))
            }
        }
    }
}

/// The page of the decisions that were made in this console. `made` contains the decisions with the links of their
/// keys.
pub(super) fn decided(decisions: &Decisions, made: &[(String, Made)], again: bool) -> Markup {
    let rows = made.iter().map(|(link, made)| {
        vec![
            html! { (time(made.at)) ", " (span(age(made.at))) " ago" },
            html! { bdi { (visible(&made.operator)) } },
            html! {
                (visible(&made.decision)) ", was " (made.state)
                @if made.unwritten.load(Ordering::Relaxed) { strong { ", not in the file" } }
            },
            html! { bdi { (visible(made.key.scope())) } },
            html! { bdi { (visible(made.key.operation())) } },
            html! { a href={ "/key/" (link) } { bdi { (visible(made.key.value())) } } },
            html! { (visible(&made.reason)) },
        ]
    });
    page(
        "Log",
        &html! {
            (refresh("/log", again))
            p {
                "The last " (KEPT) " decisions of this console, the newest first. The console began at "
                (time(decisions.since)) ". "
                @if let Some(file) = &decisions.file {
                    "The file " code { (visible(&file.to_string_lossy())) } " has all of them, unless the list says \
                     otherwise."
                }
                @else { "A restart begins with an empty list; " code { "--log FILE" } " keeps all of them." }
            }
            @if made.is_empty() { p { "No decision was made yet." } }
            @else { (table(&["Time", "By", "Decision", "Scope", "Operation", "Value", "Reason"], rows)) }
        },
    )
}

fn row((link, record): &(String, Shown), most: Option<NonZeroU32>) -> Vec<Markup> {
    vec![
        html! { (span(age(record.claimed_at))) " ago" },
        expires(record),
        html! { bdi { (visible(record.key.scope())) } },
        html! { bdi { (visible(record.key.operation())) } },
        html! { a href={ "/key/" (link) } { bdi { (shortened(record.key.value())) } } },
        html! {
            (waits_as(record, most))
            @for step in in_doubt(record) { ", step in doubt: " bdi { (visible(&step.name)) } }
        },
        html! { (record.attempt) },
        html! {
            @for step in in_doubt(record) { code { (step.downstream_key) } " " }
            @if in_doubt(record).next().is_none() {
                @if let Some(key) = &record.downstream_key { code { (key) } }
                @else if record.mode == Mode::InSteps { "the key of its last step: " code { "show --step NAME" } }
                @else { "the business table" }
            }
        },
        html! { @if let Some(error) = &record.last_error { (visible(error)) } },
    ]
}

fn expires(shown: &Shown) -> Markup {
    html! { @if shown.retention_left.is_zero() { "expired" } @else { "in " (span(shown.retention_left)) } }
}

fn in_doubt(shown: &Shown) -> impl Iterator<Item = &ShownStep> {
    shown.steps.iter().filter(|step| step.in_doubt)
}

/// The page of a key. `form` is the form for the decision, or `None` if the console is read-only.
pub(super) fn key(shown: &Shown, form: Option<Markup>) -> Markup {
    let key = &shown.key;
    let left = shown.retention_left;
    page(
        "Key",
        &html! {
            dl {
                dt { "Scope" } dd { bdi { (visible(key.scope())) } }
                dt { "Operation" } dd { bdi { (visible(key.operation())) } }
                dt { "Value" } dd { bdi { (visible(key.value())) } }
                dt { "Mode" } dd { (shown.mode) }
                dt { "State" } dd { strong { (shown.state) } }
                dt { "Attempt" } dd { (shown.attempt) }
                @for (name, at) in [("Claimed", Some(shown.claimed_at)), ("Completed", shown.completed_at)] {
                    @if let Some(at) = at { dt { (name) } dd { (time(at)) ", " (span(age(at))) " ago" } }
                }
                dt { "Expires" } dd {
                    (time(shown.expires_at))
                    @if !left.is_zero() { ", in " (span(left)) ". After that, a repeat is performed" }
                }
                @if let Some(left) = shown.lease_left {
                    dt { "Lease" } dd { (span(left)) " left: its owner may be at work" }
                } @else if let (Some(until), None) = (shown.lease_until, shown.completed_at) {
                    dt { "Lease" } dd { "lapsed at " (time(until)) ", " (span(age(until))) " ago" }
                }
                @if let Some(key) = &shown.downstream_key {
                    dt { "Downstream key" }
                    dd { code { (key) } }
                }
                @if shown.mode == Mode::InSteps {
                    dt { "Downstream key" }
                    dd { "Each step has its own; " code { "show --step NAME" } " prints that of a step which is not listed" }
                }
                @if let Some(error) = &shown.last_error { dt { "Last error" } dd { (visible(error)) } }
                @if shown.resumable { dt { "Request" } dd { "stored: a resumer may finish the operation" } }
                dt { "Token" } dd { code { (shown.token) } }
                @if let Some(bytes) = shown.response_bytes { dt { "Response" } dd { (count(bytes)) " bytes" } }
            }
            h2 { "Timeline" }
            (timeline(shown))
            @if !shown.steps.is_empty() {
                h2 { "Steps" }
                (table(&["Step", "State", "Attempt", "Time", "Look up"], shown.steps.iter().map(step)))
            }
            @if !shown.probes.is_empty() {
                h2 { "What the reconciler found" }
                (table(&["Step", "Probes"], shown.probes.iter().map(probed)))
            }
            @if let Some(form) = form { h2 { "What happened?" } (form) }
        },
    )
}

fn probed(probes: &ShownProbes) -> Vec<Markup> {
    vec![
        html! { @if let Some(step) = &probes.step { bdi { (visible(step)) } } },
        html! { (visible(&probes_in_words(probes))) },
    ]
}

fn step(step: &ShownStep) -> Vec<Markup> {
    vec![
        html! { bdi { (visible(&step.name)) } },
        html! { @if step.in_doubt { strong { "in doubt" } } @else { "finished" } },
        html! { (step.attempt) },
        html! { @if let Some(at) = step.at { (time(at)) } },
        html! { code { (step.downstream_key) } },
    ]
}

/// The form with the actions that the record allows. The form explains why the other actions are not allowed.
pub(super) fn decide(link: &str, shown: &Shown, visitor: Option<&str>) -> Markup {
    let no_effect = "It took no effect: release it";
    let mut choices = Vec::new();
    match &names_in_doubt(shown)[..] {
        [] => {
            choices.push((TOOK_EFFECT.to_owned(), "It took effect, and its response is the JSON below".to_owned()));
            choices.push(("no_effect".to_owned(), no_effect.to_owned()));
        }
        [_] => {
            let took_effect = "The step in doubt took effect, and its result is the JSON below";
            choices.push((TOOK_EFFECT.to_owned(), took_effect.to_owned()));
            choices.push(("no_effect".to_owned(), no_effect.to_owned()));
        }
        steps => {
            for (place, step) in steps.iter().enumerate() {
                let step = visible(step);
                let took_effect = format!("The step {step} took effect, and its result is the JSON below");
                choices.push((format!("{TOOK_EFFECT} {place}"), took_effect));
                choices.push((format!("no_effect {place}"), format!("The step {step} took no effect")));
            }
        }
    }
    if shown.mode != Mode::Transaction && names_in_doubt(shown).is_empty() {
        choices.push(("grant".to_owned(), "Its cause is repaired: permit one more attempt".to_owned()));
    }
    choices.push(("forget".to_owned(), "Forget it: the next call begins anew".to_owned()));
    let check = |action: &str| decision(action, shown, Box::default())?.check(shown).err();
    let refused: Vec<_> = choices.iter().map(|(action, _)| check(action)).collect();
    if let Some(Some(why)) = refused.last()
        && refused.iter().all(Option::is_some)
    {
        return html! { p { (lines(&why.to_string())) } };
    }
    html! {
        form method="post" action={ "/key/" (link) "/confirm" } {
            input type="hidden" name="seen" value=(seen(shown));
            fieldset {
                legend { "Look the key up at the service that the operation called. Then choose:" }
                @for ((action, label), refused) in choices.iter().zip(&refused) {
                    label.choice {
                        input type="radio" name="action" value=(action) required disabled[refused.is_some()];
                        (label) @if let Some(refused) = refused { ": " (lines(&refused.to_string())) }
                    }
                }
            }
            @if refused[0].is_none() {
                label {
                    "Response, as JSON that the service can decode"
                    textarea name="response" rows="4" spellcheck="false" {}
                }
            }
            label { "Reason, for the log; callers may see it" input name="reason" required maxlength="500"; }
            @if visitor.is_none() {
                label { "Your name, for the log" input name="operator" required maxlength="100" autocomplete="name"; }
            }
            button { "Continue" }
        }
    }
}

pub(super) fn confirm(link: &str, agreed: &Agreed, order: &Order) -> Markup {
    let key = &agreed.shown().key;
    let fields = [
        ("seen", &*order.seen),
        ("action", &order.action),
        ("response", &order.response),
        ("reason", &order.reason),
        ("operator", &order.operator),
    ];
    page(
        "Are you sure?",
        &html! {
            p.alert { (lines(&agreed.means())) }
            dl {
                dt { "Scope" } dd { bdi { (visible(key.scope())) } }
                dt { "Operation" } dd { bdi { (visible(key.operation())) } }
                dt { "Value" } dd { bdi { (visible(key.value())) } }
                dt { "Reason" } dd { (visible(&order.reason)) }
                dt { "Your name" } dd { (visible(&order.operator)) }
            }
            @if order.gives_json() { pre tabindex="0" { (lines(&order.response)) } }
            form method="post" action={ "/key/" (link) "/settle" } {
                @for (name, value) in fields { input type="hidden" name=(name) value=(value); }
                button { "Yes" }
                " " a href={ "/key/" (link) } { "No, go back" }
            }
        },
    )
}

/// The page of a decision that was made. A person copies the whole key from this page into a ticket. `unwritten` is the
/// log file that could not be written, and the reason.
pub(super) fn settled(link: &str, key: &Key, done: &str, unwritten: Option<(&Path, io::Error)>) -> Markup {
    page(
        "Done",
        &html! {
            p.good role="status" { (lines(done)) }
            @if let Some((file, error)) = unwritten {
                p.alert role="alert" {
                    "The decision is made, but could not be written to the log file "
                    code { (visible(&file.to_string_lossy())) } ": " (visible(&error.to_string()))
                    ". Standard output and the page " a href="/log" { "Log" } " have it."
                }
            }
            dl {
                dt { "Scope" } dd { bdi { (visible(key.scope())) } }
                dt { "Operation" } dd { bdi { (visible(key.operation())) } }
                dt { "Value" } dd { bdi { (visible(key.value())) } }
            }
            p {
                a href="/waiting" { "The keys that wait" } " · " a href={ "/key/" (link) } { "This key" } " · "
                a href="/log" { "Log" }
            }
        },
    )
}
