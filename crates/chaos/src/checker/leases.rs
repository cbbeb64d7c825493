//! The promise of leases: one stored result, which never changes, and which the owner of the claim has stored. A second
//! effect outside is counted. Under *at most once* it is a violation.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{Aftermath, OneKey, answers_agree, by_key, one_completion_and_no_wrong_answer};
use crate::history::{Call, What};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Promise {
    AtLeastOnce,
    AtMostOnce,
    /// At most once, and reconcilers settle what is in doubt.
    Reconciled,
    /// [`steps`](super::steps) checks it.
    InSteps,
}

#[derive(Debug, Default)]
pub(crate) struct Checked {
    pub(crate) violations: Vec<String>,
    /// Keys whose effect happened more than once for a downstream service that deduplicates nothing.
    pub(crate) doubles: usize,
}

pub(crate) fn check(calls: &[Call], after: &Aftermath, promise: Promise) -> Checked {
    let mut checked = Checked::default();
    for (key, one) in by_key(calls, after) {
        let mut say = |what: String| checked.violations.push(format!("{key}: {what}"));
        one_result_is_stored(&one, &mut say);
        one_completion_and_no_wrong_answer(&one, &mut say);
        let downstream: HashSet<_> = one.effects.iter().map(|effect| &effect.downstream_key).collect();
        if downstream.len() > 1 {
            say(format!("{} downstream keys for one operation", downstream.len()));
        }
        if one.effects.len() > 1 {
            checked.doubles += 1;
            if matches!(promise, Promise::AtMostOnce | Promise::Reconciled) {
                say(format!("{} effects, under at most once", one.effects.len()));
            }
        }
        answers_agree(&one, &mut say);
    }
    checked.violations.sort();
    checked
}

fn one_result_is_stored(one: &OneKey<'_>, say: &mut impl FnMut(String)) {
    let stored: Vec<_> = one.records.iter().filter(|record| record.completed).collect();
    for call in &one.calls {
        let Some(response) = call.response() else { continue };
        match stored.as_slice() {
            [record] if record.response.as_deref() == Some(response) => {}
            [record] => {
                let now = record.response.as_deref().unwrap_or("nothing");
                say(format!("{} got {response}, and {now} is stored: the result has changed", call.name));
            }
            others => say(format!("{} got {response}, and {} results are stored", call.name, others.len())),
        }
        if !one.has_effect_of(response) {
            say(format!("{} got {response}, which has no effect", call.name));
        }
        if matches!(call.end, What::Performed(_))
            && let [record] = stored.as_slice()
            && call.token.is_some_and(|token| token != record.token)
        {
            say(format!("the completion of {} was accepted with a token that is not the claim's", call.name));
        }
    }
    for record in &stored {
        let response = record.response.as_deref().unwrap_or("nothing");
        if !one.has_effect_of(response) {
            say(format!("{response} is stored, without an effect"));
        }
    }
}
