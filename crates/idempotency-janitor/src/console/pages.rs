//! The templates of the pages. `html!` escapes every value. Foreign text first goes through the module `text`.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use axum::http::StatusCode;
use maud::{DOCTYPE, Markup, html};
use pg_idempotency::operator::{Shown, ShownProbes, ShownStep, Stats, Warning};
use pg_idempotency::{Key, Mode};

use super::order::{Order, TOOK_EFFECT, decision, version};
use super::text::{age, count, lines, shortened, span, time, visible};
use crate::keys::{names_in_doubt, probes_in_words, waits_as};
use crate::settle::Agreed;
use crate::stats::size;

/// How many of the oldest keys the list shows. A person settles fewer keys at once.
pub(super) const LISTED: u32 = 100;

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
                nav aria-label="Pages" { a href="/" { "Overview" } a href="/waiting" { "Waiting for a person" } }
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
pub(super) fn overview(waiting: Option<&[Shown]>, stats: &Stats, warnings: &[Warning], read_only: bool) -> Markup {
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
            @if let Some(found) = waiting { (first_to_expire(found.iter().map(|shown| (None, shown)))) }
            h2 { "Health" }
            @if warnings.is_empty() { p.good[well] { "There are no warnings." } }
            @else { ul { @for warning in warnings { li.alert { (lines(&warning.to_string())) } } } }
            h2 { "Look up a key" }
            form method="post" action="/find" {
                @for (name, label) in [("scope", "Scope"), ("operation", "Operation"), ("value", "Value")] {
                    label { (label) input name=(name) required maxlength="255" autocomplete="off"; }
                }
                button { "Show it" }
            }
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

/// The page of the keys that wait. `found` contains the records with their links.
pub(super) fn waiting(found: &[(String, Shown)], most: Option<NonZeroU32>) -> Markup {
    let columns = ["Claimed", "Expires", "Scope", "Operation", "Key", "State", "Attempt", "Look up", "Last error"];
    let listed = found.len().min(LISTED as usize);
    page(
        "Waiting for a person",
        &html! {
            @if found.is_empty() { p.good { "No key waits." } } @else {
                p {
                    (listed) " keys, the oldest claim first."
                    @if listed < found.len() { " There are more: settle these, or use the command line." }
                }
                (first_to_expire(found[..listed].iter().map(|(link, shown)| (Some(&**link), shown))))
                (table(&columns, found[..listed].iter().map(|found| row(found, most))))
            }
        },
    )
}

/// The deadline of the person who reads the page.
fn first_to_expire<'a>(found: impl Iterator<Item = (Option<&'a str>, &'a Shown)>) -> Markup {
    let Some((link, first)) = found.min_by_key(|(_, shown)| shown.expires_at) else { return Markup::default() };
    let name = html! { bdi { (visible(first.key.operation())) " " (shortened(first.key.value())) } };
    html! {
        p {
            "The first to expire is "
            @if let Some(link) = link { a href={ "/key/" (link) } { (name) } } @else { (name) }
            @if first.retention_left.is_zero() { ", which has expired" }
            @else { ", in " (span(first.retention_left)) ", at " (time(first.expires_at)) }
            ". After that, a repeat is performed."
        }
    }
}

fn row((link, record): &(String, Shown), most: Option<NonZeroU32>) -> Vec<Markup> {
    vec![
        html! { (span(age(record.claimed_at))) " ago" },
        html! { @if record.retention_left.is_zero() { "expired" } @else { "in " (span(record.retention_left)) } },
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
                }
                @if let Some(key) = &shown.downstream_key {
                    dt { "Downstream key" }
                    dd { code { (key) } }
                }
                @if shown.mode == Mode::InSteps {
                    dt { "Downstream key" }
                    dd { "Each step has its own; " code { "show --step NAME" } " prints that of a step which is not listed" }
                }
                @if let Some(trace) = &shown.trace { dt { "Trace" } dd { code { (visible(trace)) } } }
                @if let Some(error) = &shown.last_error { dt { "Last error" } dd { (visible(error)) } }
                @if shown.resumable { dt { "Request" } dd { "stored: a resumer may finish the operation" } }
                dt { "Token" } dd { code { (shown.token) } }
                @if let Some(bytes) = shown.response_bytes { dt { "Response" } dd { (count(bytes)) " bytes" } }
            }
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
            input type="hidden" name="seen" value=(version(shown));
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

/// The receipt of a decision, with the whole key, which a person copies into a ticket.
pub(super) fn settled(link: &str, key: &Key, done: &str) -> Markup {
    page(
        "Done",
        &html! {
            p.good role="status" { (lines(done)) }
            dl {
                dt { "Scope" } dd { bdi { (visible(key.scope())) } }
                dt { "Operation" } dd { bdi { (visible(key.operation())) } }
                dt { "Value" } dd { bdi { (visible(key.value())) } }
            }
            p { a href="/waiting" { "The keys that wait" } " · " a href={ "/key/" (link) } { "This key" } }
        },
    )
}
