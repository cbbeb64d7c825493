//! The pages. `html!` escapes every value that is put into it; text of other people's goes through `text` first.

use std::collections::{BTreeMap, BTreeSet};

use axum::http::StatusCode;
use maud::{DOCTYPE, Markup, html};
use pg_idempotency::operator::{AGES, STATES, Shown, Stats, StoredResponse, Unsettled, Warning};
use pg_idempotency::{Key, Mode};
use serde_json::value::RawValue;

use super::access::Visitor;
use super::search::Found;
use super::text::{age, body, count, lines, shortened, span, time, visible};
use super::{Filter, Order, Revealed, version};
use crate::settle::{Decision, in_doubt};
use crate::stats::size;

/// Rows of one page of the list.
const ROWS: usize = 50;
/// The widest bar of the chart, in its own units.
const BAR: f64 = 60.0;

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

/// A person's way out of an error. `link` is the key that it is about.
pub(super) fn refused(status: StatusCode, why: &str, link: Option<&str>) -> Markup {
    page(
        status.canonical_reason().unwrap_or("Error"),
        &html! {
            p.alert role="alert" { (lines(why)) }
            @if let Some(link) = link { p { a href={ "/key/" (link) } { "The key as it is now" } } }
        },
    )
}

pub(super) fn overview(stats: &Stats, warnings: &[Warning], read_only: bool, visitor: &Visitor) -> Markup {
    let about = if stats.exact { "" } else { "~" };
    let mut modes: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
    for group in &stats.groups {
        *modes.entry(group.mode.as_str()).or_default().entry(&group.state).or_default() += group.records;
    }
    let states: BTreeSet<_> = stats.groups.iter().map(|group| &*group.state).collect();
    page(
        "Overview",
        &html! {
            @if read_only { p { "This console is read-only." } }
            h2 { "Health" }
            @if warnings.is_empty() { p.good { "Nothing keeps a promise from holding." } }
            @else { ul { @for warning in warnings { li.alert { (lines(&warning.to_string())) } } } }
            h2 { "Table" }
            dl {
                dt { "Records" } dd { (about) (count(stats.records)) @if !stats.exact { " (estimated from a sample)" } }
                dt { "Table" } dd { (size(stats.table_bytes)) }
                dt { "Indexes" } dd { (size(stats.index_bytes)) }
                dt { "Dead rows" } dd { (count(stats.dead_rows)) }
                dt { "Sweep" } dd {
                    @match stats.oldest_expired {
                        Some(oldest) => { "lags by " (span(oldest)) ": so long ago the oldest record expired" }
                        None => "does not lag: no expired record waits",
                    }
                }
            }
            h2 { "Records by mode and state" }
            table {
                thead { tr { th scope="col" { "Mode" } @for state in &states { th.number scope="col" { (state) } } } }
                tbody {
                    @for (mode, counts) in &modes {
                        tr {
                            th scope="row" { (mode) }
                            @for state in &states {
                                td.number data-label=(state) { @if let Some(records) = counts.get(state) { (about) (count(*records)) } @else { "0" } }
                            }
                        }
                    }
                }
            }
            h2 { "Records by age and state" }
            (chart(stats, about))
            h2 { "Look a key up" }
            form method="post" action="/find" {
                (csrf(visitor))
                @for (name, label) in [("scope", "Scope"), ("operation", "Operation"), ("value", "Value")] {
                    label { (label) input name=(name) required maxlength="255" autocomplete="off"; }
                }
                button { "Show it" }
            }
        },
    )
}

/// One bar for each class of age, with a part for each state.
fn chart(stats: &Stats, about: &str) -> Markup {
    let mut bars = [[0_u64; STATES.len()]; AGES.len()];
    for group in &stats.groups {
        if let Some(state) = STATES.iter().position(|state| *state == group.state) {
            bars[group.age.min(AGES.len() - 1)][state] += group.records;
        }
    }
    let total = |parts: &[u64]| parts.iter().sum::<u64>();
    let most = bars.iter().map(|bar| total(bar)).max().unwrap_or_default().max(1) as f64;
    let width = |records: u64| records as f64 / most * BAR;
    html! {
        svg viewBox="0 0 100 35" role="img" aria-label="Records by the time since their claim" {
            @for (age, bar) in bars.iter().enumerate() {
                @let y = age * 7 + 1;
                text x="13" y=(y + 4) text-anchor="end" { (AGES[age]) }
                @for (n, state) in STATES.iter().enumerate() {
                    rect class={ "state-" (state) } x=(15.0 + width(total(&bar[..n]))) y=(y) width=(width(bar[n])) height="5" {}
                }
                text x=(16.0 + width(total(bar))) y=(y + 4) { (about) (count(total(bar))) }
            }
        }
        ul.legend { @for state in STATES { li class={ "state-" (state) } { (state) } } }
    }
}

fn csrf(visitor: &Visitor) -> Markup {
    html! { input type="hidden" name="csrf" value=(visitor.csrf); }
}

pub(super) fn waiting(found: &Found, records: &[(String, &Unsettled)], filter: &Filter) -> Markup {
    let first = filter.page.saturating_mul(ROWS).min(records.len());
    let shown = &records[first..(first + ROWS).min(records.len())];
    let turn = |name: &str, page: usize| {
        html! {
            form {
                @for (name, value) in [("scope", &filter.scope), ("operation", &filter.operation), ("older_than", &filter.older_than)] {
                    input type="hidden" name=(name) value=(value);
                }
                button name="page" value=(page) { (name) }
            }
        }
    };
    page(
        "Waiting for a person",
        &html! {
            form.filter {
                label { "Scope" input name="scope" value=(filter.scope); }
                label { "Operation" input name="operation" value=(filter.operation); }
                label { "Older than" input name="older_than" value=(filter.older_than) placeholder="30m, 2h, 7d" size="8"; }
                button { "Filter" }
            }
            @if let Some(error) = &found.error { p.alert role="alert" { "The search failed: " (lines(error)) } }
            p {
                @match found.ended {
                    Some(ended) => { "The search of " (time(ended)) " has read " (count(found.read)) " records." }
                    None => { strong { "Incomplete" } ": the search goes on, and has read " (count(found.read)) " records." }
                }
                @if found.is_full() { " It lists the oldest " (count(found.records.len() as u64)) " keys; there may be more." }
            }
            @if records.is_empty() && found.ended.is_none() { p { "None is found yet." } }
        @else if records.is_empty() { p.good { "No key waits." } } @else {
                p { (count(first as u64 + 1)) " to " (count((first + shown.len()) as u64)) " of " (count(records.len() as u64)) ", the oldest claim first" }
                table {
                    thead { tr { @for name in ["Claimed", "Scope", "Operation", "Key", "State", "Attempt", "Look up", "Last error"] { th scope="col" { (name) } } } }
                    tbody {
                        @for (id, record) in shown {
                            tr {
                                td data-label="Claimed" { (age(record.claimed_at)) " ago" }
                                td data-label="Scope" { bdi { (visible(&record.scope)) } }
                                td data-label="Operation" { bdi { (visible(&record.operation)) } }
                                td data-label="Key" { a href={ "/key/" (id) } { bdi { (shortened(&record.value)) } } }
                                td data-label="State" {
                                    (record.state)
                                    @if record.state != "indeterminate" { ", exhausted" }
                                    @if let Some(step) = &record.step { ", step in doubt: " bdi { (visible(step)) } }
                                }
                                td.number data-label="Attempt" { (record.attempt) }
                                td data-label="Look up" { code { (record.downstream_key.as_deref().unwrap_or("the business table")) } }
                                td data-label="Last error" { @if let Some(error) = &record.last_error { (visible(error)) } }
                            }
                        }
                    }
                }
                div.turn {
                    @if first > 0 { (turn("Earlier", filter.page - 1)) }
                    @if first + shown.len() < records.len() { (turn("Later", filter.page + 1)) }
                }
            }
        },
    )
}

/// What all pages of a key show.
pub(super) struct OfKey<'a> {
    pub(super) id: &'a str,
    pub(super) key: &'a Key,
    pub(super) shown: &'a Shown,
    pub(super) visitor: &'a Visitor,
}

pub(super) fn key(of: &OfKey<'_>, revealed: &Revealed, response: Option<&StoredResponse>, read_only: bool) -> Markup {
    let OfKey { key, shown, .. } = of;
    page(
        "Key",
        &html! {
            dl {
                dt { "Scope" } dd { bdi { (visible(key.scope())) } }
                dt { "Operation" } dd { bdi { (visible(key.operation())) } }
                dt { "Value" } dd {
                    @if revealed.value { bdi { (visible(key.value())) } }
                    @else { bdi { (shortened(key.value())) } " " a href="?value=true" { "Show it all" } }
                }
                dt { "Mode" } dd { (shown.mode) }
                dt { "State" } dd { strong { (shown.state) } }
                dt { "Attempt" } dd { (shown.attempt) }
                dt { "Claimed" } dd { (time(shown.claimed_at)) ", " (age(shown.claimed_at)) " ago" }
                @if let Some(at) = shown.completed_at { dt { "Completed" } dd { (time(at)) ", " (age(at)) " ago" } }
                dt { "Expires" } dd { (time(shown.expires_at)) @if !shown.retention_left.is_zero() { ", in " (span(shown.retention_left)) ". After that, a repeat is performed" } }
                @if let Some(left) = shown.lease_left { dt { "Lease" } dd { (span(left)) " left: its owner may be at work" } }
                @if let Some(downstream) = &shown.downstream_key { dt { "Downstream key" } dd { code { (downstream) } @if shown.mode == Mode::InSteps { ". Each step has its own" } } }
                @if let Some(error) = &shown.last_error { dt { "Last error" } dd { (visible(error)) } }
                @if shown.resumable { dt { "Request" } dd { "stored: a resumer may finish the operation" } }
                dt { "Token" } dd { code { (shown.token) } }
                @if let Some(bytes) = shown.response_bytes { dt { "Response" } dd { (count(bytes)) " bytes " a href="?response=true" { "Show it" } } }
            }
            @if let Some(response) = response { (stored(response)) }
            @if !shown.steps.is_empty() { (steps(shown)) }
            @if !read_only { h2 { "What happened?" } (decide(of)) }
        },
    )
}

fn stored(response: &StoredResponse) -> Markup {
    let shown = response.body.as_ref().map_or(0, Vec::len) as u64;
    html! {
        h2 { "Response" }
        @if let Some(status) = response.status { p { "Status " (status) } }
        @if !response.headers.is_empty() {
            dl { @for (name, value) in &response.headers { dt { (visible(name)) } dd { (visible(value)) } } }
        }
        @match body(response) { Some(body) => pre tabindex="0" { (body) }, None => p { "The service did not store the body." } }
        @if shown < response.bytes { p { "Incomplete: the first " (count(shown)) " of " (count(response.bytes)) " bytes." } }
    }
}

fn steps(shown: &Shown) -> Markup {
    html! {
        h2 { "Steps" }
        table {
            thead { tr { @for name in ["Step", "State", "Attempt", "Time", "Look up"] { th scope="col" { (name) } } } }
            tbody {
                @for step in &shown.steps {
                    tr {
                        td data-label="Step" { bdi { (visible(&step.name)) } }
                        td data-label="State" { @if step.in_doubt { strong { "in doubt" } } @else { "finished" } }
                        td.number data-label="Attempt" { (step.attempt) }
                        td data-label="Time" { @if let Some(at) = step.at { (time(at)) } }
                        td data-label="Look up" { code { (step.downstream_key) } }
                    }
                }
            }
        }
    }
}

/// The form with the actions that the record allows, and why it does not allow the others.
fn decide(OfKey { id, shown, visitor, .. }: &OfKey<'_>) -> Markup {
    let json = RawValue::NULL.to_owned();
    let (took_effect, returned) = match in_doubt(shown) {
        Some(step) => (
            Decision::ResolveStep { step: step.to_owned(), result: json },
            "The step in doubt took effect, and its result is the JSON below",
        ),
        None => (
            Decision::Resolve { response: json, retention: None },
            "It took effect, and its response is the JSON below",
        ),
    };
    let actions = [
        ("took_effect", returned, took_effect),
        ("no_effect", "It took no effect: release it", Decision::Release),
        ("forget", "Forget it: the next call begins anew", Decision::Forget),
    ];
    let resolvable = actions[0].2.check(shown).is_ok();
    if actions.iter().all(|(.., decision)| decision.check(shown).is_err()) {
        let why = Decision::Forget.check(shown).map_or_else(|failure| failure.in_one_line(), |()| String::new());
        return html! { p { (lines(&why)) } };
    }
    html! {
        form method="post" action={ "/key/" (id) "/confirm" } {
            (csrf(visitor))
            input type="hidden" name="seen" value=(version(shown));
            fieldset {
                legend { "Look it up at the service that it called. Then:" }
                @for (name, label, decision) in &actions {
                    @let refused = decision.check(shown).err();
                    label.choice {
                        input type="radio" name="action" value=(name) required disabled[refused.is_some()];
                        (label) @if let Some(refused) = refused { ": " (lines(&refused.to_string())) }
                    }
                }
            }
            @if resolvable { label { "Response, as JSON that the service can decode" textarea name="response" rows="4" spellcheck="false" {} } }
            label { "Reason, for the log; callers may be told" input name="reason" required maxlength="500"; }
            @if visitor.name.is_none() { label { "Your name, for the log" input name="operator" required maxlength="100" autocomplete="name"; } }
            button { "Continue" }
        }
    }
}

pub(super) fn confirm(of: &OfKey<'_>, order: &Order, decision: &Decision, operator: &str) -> Markup {
    let OfKey { id, key, shown, visitor } = of;
    let (action, response) = match decision {
        Decision::Resolve { response: json, .. } | Decision::ResolveStep { result: json, .. } => {
            ("took_effect", Some(json))
        }
        Decision::Release => ("no_effect", None),
        Decision::Forget => ("forget", None),
    };
    page(
        "Are you sure?",
        &html! {
            p.alert { (lines(&decision.means(shown))) }
            dl {
                dt { "Scope" } dd { bdi { (visible(key.scope())) } }
                dt { "Operation" } dd { bdi { (visible(key.operation())) } }
                dt { "Value" } dd { bdi { (visible(key.value())) } }
                dt { "Reason" } dd { (visible(&order.reason)) }
                dt { "Your name" } dd { (visible(operator)) }
            }
            @if let Some(response) = response { pre tabindex="0" { (lines(response.get())) } }
            form method="post" action={ "/key/" (id) "/settle" } {
                (csrf(visitor))
                input type="hidden" name="seen" value=(version(shown));
                input type="hidden" name="action" value=(action);
                input type="hidden" name="response" value=(order.response);
                input type="hidden" name="reason" value=(order.reason);
                input type="hidden" name="operator" value=(operator);
                button { "Yes" }
                " " a href={ "/key/" (id) } { "No, go back" }
            }
        },
    )
}

pub(super) fn settled(id: &str, done: &str) -> Markup {
    page(
        "Done",
        &html! {
            p.good role="status" { (lines(done)) }
            p { a href="/waiting" { "The keys that wait" } " · " a href={ "/key/" (id) } { "This key" } }
        },
    )
}
