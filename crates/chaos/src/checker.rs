//! Compares the callers' history with the tables. Here are the promises of transaction mode.
//!
//! # Layout
//!
//! - [`marks`], [`leases`] and [`steps`] are the promises of the other modes.
//! - [`register`] gives the answers to a checker that others wrote.
//! - [`histories`] writes them for the specification.
//! - `tests` has a bad history for each rule.

pub(crate) mod histories;
pub(crate) mod leases;
pub(crate) mod marks;
pub(crate) mod register;
pub(crate) mod steps;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use crate::history::{Call, What};
use crate::request::INDETERMINATE;

/// What the database contains when the fault is over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Aftermath {
    pub(crate) effects: Vec<Effect>,
    pub(crate) records: Vec<Stored>,
}

/// A row of a table without any unique constraint.
#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Effect {
    pub(crate) key: String,
    /// The call that had the effect.
    pub(crate) call: String,
    /// Lease mode: the key that the outside was given.
    pub(crate) downstream_key: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Stored {
    pub(crate) key: String,
    pub(crate) token: i64,
    pub(crate) completed: bool,
    /// The response, which is the name of the call that performed.
    pub(crate) response: Option<String>,
}

/// The calls, effects and records of one key.
#[derive(Debug, Default)]
struct OneKey<'a> {
    pub(crate) calls: Vec<&'a Call>,
    pub(crate) effects: Vec<&'a Effect>,
    pub(crate) records: Vec<&'a Stored>,
}

impl OneKey<'_> {
    pub(crate) fn has_effect_of(&self, call: &str) -> bool {
        self.effects.iter().any(|effect| effect.call == call)
    }

    fn stores(&self, response: &str) -> bool {
        self.records.iter().any(|record| record.completed && record.response.as_deref() == Some(response))
    }
}

fn by_key<'a>(calls: &'a [Call], after: &'a Aftermath) -> HashMap<&'a str, OneKey<'a>> {
    let mut keys: HashMap<&str, OneKey<'_>> = HashMap::new();
    for call in calls {
        keys.entry(&call.key).or_default().calls.push(call);
    }
    for effect in &after.effects {
        keys.entry(&effect.key).or_default().effects.push(effect);
    }
    for record in &after.records {
        keys.entry(&record.key).or_default().records.push(record);
    }
    keys
}

/// Checks transaction mode, where every key is remembered to the end and asked for until a caller gets a response.
pub(crate) fn violations(calls: &[Call], after: &Aftermath) -> Vec<String> {
    let mut all = Vec::new();
    for (key, one) in by_key(calls, after) {
        let mut say = |what: String| all.push(format!("{key}: {what}"));
        effect_and_record_agree(&one, &mut say);
        for call in &one.calls {
            told_the_truth(call, &one, &mut say);
        }
        answers_agree(&one, &mut say);
    }
    all.sort();
    all
}

/// There is at most one effect, and a response for each effect and for nothing else.
fn effect_and_record_agree(one: &OneKey<'_>, say: &mut impl FnMut(String)) {
    if one.effects.len() > 1 {
        let calls: Vec<_> = one.effects.iter().map(|effect| effect.call.as_str()).collect();
        say(format!("{} effects, of {}", calls.len(), calls.join(" and ")));
    }
    if one.records.len() > 1 {
        say(format!("{} records", one.records.len()));
    }
    for record in &one.records {
        match &record.response {
            _ if !record.completed => say("a record that is not completed was left behind".to_owned()),
            Some(response) if one.has_effect_of(response) => {}
            Some(response) => say(format!("the response of {response} is stored, without its effect")),
            None => say("completed without a response".to_owned()),
        }
    }
    for effect in &one.effects {
        if !one.stores(&effect.call) {
            say(format!("the effect of {} is there, without its response", effect.call));
        }
    }
}

fn told_the_truth(call: &Call, one: &OneKey<'_>, say: &mut impl FnMut(String)) {
    let name = &call.name;
    match &call.end {
        What::Performed(response) if response != name => {
            say(format!("{name} performed, and got the response of {response}"));
        }
        What::Performed(response) | What::Replayed(response) => {
            if !one.has_effect_of(response) {
                say(format!("{name} was told of the effect of {response}, which is not there"));
            }
            if !one.stores(response) {
                say(format!("{name} got the response of {response}, which is not what is stored"));
            }
        }
        What::Refused(why) if one.has_effect_of(name) => say(format!("{name} was refused ({why}), and has an effect")),
        What::Wrong(why) | What::Barred(why) => say(format!("{name} was told: {why}")),
        What::Refused(_) | What::Unknown(_) | What::Invoked | What::Claimed(_) => {}
    }
}

/// A caller got an answer, and later callers got the same answer.
fn answers_agree(one: &OneKey<'_>, say: &mut impl FnMut(String)) {
    somebody_was_answered(one, say);
    later_calls_see_earlier_answers(&one.calls, say);
}

/// At most one call may be told that it has performed. An indeterminate operation is one for the operator.
fn one_completion_and_no_wrong_answer(one: &OneKey<'_>, say: &mut impl FnMut(String)) {
    for call in &one.calls {
        if let What::Wrong(why) | What::Barred(why) = &call.end
            && why != INDETERMINATE
        {
            say(format!("{} was told: {why}", call.name));
        }
    }
    let accepted = one.calls.iter().filter(|call| matches!(call.end, What::Performed(_))).count();
    if accepted > 1 {
        say(format!("{accepted} completions were accepted"));
    }
}

fn somebody_was_answered(one: &OneKey<'_>, say: &mut impl FnMut(String)) {
    if !one.calls.is_empty() && one.calls.iter().all(|call| call.response().is_none()) {
        say("asked for again and again, and never answered".to_owned());
    }
}

/// Real-time order: a caller that asks after another one was answered gets the same answer, and performs nothing.
fn later_calls_see_earlier_answers(calls: &[&Call], say: &mut impl FnMut(String)) {
    let first = calls.iter().filter(|call| call.response().is_some()).min_by_key(|call| call.ended);
    let Some(first) = first else { return };
    for later in calls.iter().filter(|later| later.invoked > first.ended) {
        if matches!(later.end, What::Performed(_)) {
            say(format!("{} performed, although {} had been answered before it asked", later.name, first.name));
        }
        if later.response().is_some_and(|response| Some(response) != first.response()) {
            say(format!("{} did not get the response that {} had got before", later.name, first.name));
        }
    }
}

/// The number of answers that were given and are not true any more. Set-ups that promise nothing count them.
pub(crate) fn lost(calls: &[Call], after: &Aftermath) -> usize {
    let keys = by_key(calls, after);
    let is_lost =
        |call: &&Call| call.response().is_some_and(|response| !keys[call.key.as_str()].has_effect_of(response));
    calls.iter().filter(is_lost).count()
}
