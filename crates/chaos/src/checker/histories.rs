//! The calls of a key as a history of `model/History.tla`: when each call began and returned, its result, and whether
//! the database has its effect. `script/model --histories` asks the specification whether it allows them.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use super::{Aftermath, OneKey, by_key};
use crate::history::{Call, Moment, What};
use crate::request::INDETERMINATE;

/// TLC's search grows with the calls of a history, of which `History.cfg` has as many, and with those that are open at
/// the same time. A call with an unknown result stays open.
const CALLS: usize = 12;
const AT_ONCE: usize = 5;
/// The histories of each world that are kept.
const KEPT: usize = 12;
/// The calls of a key with the same answer, or which were refused because another call was in flight.
const REPLAYS: usize = 2;
const IN_FLIGHT: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) histories: Vec<History>,
    /// The keys without a history here, for each reason.
    pub(crate) left_out: BTreeMap<&'static str, usize>,
}

/// The history of a key, as a record of TLA+.
#[derive(Debug)]
pub(crate) struct History {
    pub(crate) key: String,
    pub(crate) text: String,
    calls: usize,
}

impl Told {
    pub(crate) fn add(&mut self, other: Self) {
        self.histories.extend(other.histories);
        for (reason, count) in other.left_out {
            *self.left_out.entry(reason).or_default() += count;
        }
    }
}

/// `calls` are all calls of a world, in a mode of the specification or in none. The keys with a violation come first.
pub(crate) fn of(mode: Option<&str>, calls: &[Call], after: &Aftermath, violations: &[String]) -> Told {
    let mut told = Told::default();
    for (key, one) in by_key(calls, after) {
        let history = match mode {
            None => Err("the operation has steps, and the caller does not know the answer of each"),
            Some(mode) => history(mode, key, &one),
        };
        match history {
            Ok(history) => told.histories.push(history),
            Err(reason) => *told.left_out.entry(reason).or_default() += 1,
        }
    }
    let violated = |key: &str| violations.iter().any(|found| found.split_once(": ").is_some_and(|(of, _)| of == key));
    told.histories.sort_by_cached_key(|one| (!violated(&one.key), usize::MAX - one.calls, one.key.clone()));
    let more = told.histories.len().saturating_sub(KEPT);
    if more > 0 {
        told.histories.truncate(KEPT);
        told.left_out.insert("the world has enough others, with more calls", more);
    }
    told
}

fn history(mode: &str, key: &str, one: &OneKey<'_>) -> Result<History, &'static str> {
    let fits = |calls: &[&Call]| calls.len() <= CALLS && at_once(calls) <= AT_ONCE;
    let mut calls = that_matter(one);
    if !fits(&calls) {
        // Without a refusal that has to be explained, a transaction that was rolled back cannot be seen.
        let in_transaction = matches!(mode, "transaction" | "mark");
        calls.retain(|call| !is_in_flight(call) && (!in_transaction || leaves_a_trace(call, one)));
    }
    if calls.is_empty() {
        return Err("no call was answered");
    }
    if calls.len() > CALLS {
        return Err("too many calls");
    }
    if !fits(&calls) {
        return Err("too many calls at the same time");
    }
    Ok(History { key: key.to_owned(), text: text(mode, &calls, one), calls: calls.len() })
}

fn is_in_flight(call: &Call) -> bool {
    // The HTTP layer also says so, in other words: there it may mean a request that has not asked the database.
    matches!(&call.end, What::Refused(why) if why == "in flight")
}

fn leaves_a_trace(call: &Call, one: &OneKey<'_>) -> bool {
    call.token.is_some()
        || one.has_effect_of(&call.name)
        || !matches!(call.end, What::Refused(_) | What::Unknown(_) | What::Invoked | What::Claimed(_))
}

/// Leaves out replays that are possible because an earlier one is, and most of the refusals of callers that ask again
/// and again. They change nothing.
fn that_matter<'a>(one: &OneKey<'a>) -> Vec<&'a Call> {
    let mut calls = one.calls.clone();
    calls.sort_by_key(|call| (!is_in_flight(call), call.ended));
    let in_flight = calls.iter().filter(|call| is_in_flight(call)).count();
    let mut replays: HashMap<&str, usize> = HashMap::new();
    // The latest refusals say most: none may come after an answer.
    let mut calls = calls.split_off(in_flight.saturating_sub(IN_FLIGHT));
    calls.retain(|call| match &call.end {
        What::Replayed(response) => {
            let count = replays.entry(response).or_default();
            *count += 1;
            *count <= REPLAYS
        }
        _ => true,
    });
    calls.sort_by_key(|call| call.invoked);
    calls
}

/// Begins and returns, in their order. At the same moment, the begins come first: such calls are concurrent.
fn events(calls: &[&Call]) -> Vec<(Moment, bool, usize)> {
    let mut events = Vec::new();
    for (place, call) in calls.iter().enumerate() {
        events.push((call.invoked, false, place));
        if !matches!(call.end, What::Unknown(_)) {
            events.push((call.ended, true, place));
        }
    }
    events.sort_unstable();
    events
}

fn at_once(calls: &[&Call]) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for (_, returns, _) in events(calls) {
        open = if returns { open - 1 } else { open + 1 };
        most = most.max(open);
    }
    most
}

fn text(mode: &str, calls: &[&Call], one: &OneKey<'_>) -> String {
    // A letter for each call. `Z` is for an answer that is of none of them.
    let letter = |place: usize| char::from(b'A' + u8::try_from(place).unwrap_or(25).min(25));
    let letter_of = |name: &str| letter(calls.iter().position(|call| call.name == name).unwrap_or(25));
    let mut text = format!("[mode |-> \"{mode}\", effects |-> {}, calls |-> [", one.effects.len());
    for (place, call) in calls.iter().enumerate() {
        let end = match &call.end {
            What::Performed(_) => "performed",
            What::Replayed(_) => "replayed",
            What::Refused(_) if is_in_flight(call) => "in flight",
            What::Refused(_) => "failed",
            What::Unknown(_) | What::Invoked | What::Claimed(_) => "unknown",
            What::Barred(why) if why == INDETERMINATE => "indeterminate",
            What::Barred(_) | What::Wrong(_) => "wrong",
        };
        let of = call.response().map(|name| letter_of(name).to_string()).unwrap_or_default();
        let effect = if one.has_effect_of(&call.name) { "TRUE" } else { "FALSE" };
        let comma = if place == 0 { "" } else { "," };
        let name = letter(place);
        let _ = write!(
            text,
            "{comma}\n      {name} |-> [end |-> \"{end}\", of |-> \"{of}\", effect |-> {effect}, body |-> 1]"
        );
    }
    let events: Vec<String> = events(calls).iter().map(|(_, _, place)| format!("\"{}\"", letter(*place))).collect();
    let _ = write!(text, "],\n    events |-> <<{}>>]", events.join(", "));
    text
}

/// The module with these histories, and their names behind it.
pub(crate) fn module<'a>(histories: impl Iterator<Item = (&'a str, &'a History)>) -> String {
    let (names, texts): (Vec<String>, Vec<&str>) =
        histories.map(|(of, history)| (format!("{of} {}", history.key), history.text.as_str())).unzip();
    format!(
        "---- MODULE Histories ----\n\\* Written by script/chaos --histories.\nHistories == <<\n  {}\n>>\n====\n{}\n",
        texts.join(",\n  "),
        names.join("\n")
    )
}
