//! The promise of operations in steps: each effect as often as its kind of step allows, one answer for all callers, and
//! no operation that stays unfinished.

use std::collections::HashSet;

use super::{Aftermath, OneKey, answers_agree, by_key, one_completion_and_no_wrong_answer};
use crate::history::Call;

pub(crate) const ROW: &str = "row";
pub(crate) const CHARGE: &str = "charge";
pub(crate) const TEXT: &str = "text";
/// Not a step: a row that was committed when a later attempt had claimed the operation.
pub(crate) const OVERTAKEN: &str = "overtaken";

/// The effect of one step.
#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Part {
    pub(crate) key: String,
    /// The call that had the effect.
    pub(crate) call: String,
    pub(crate) step: String,
    /// The key that was given to the outside.
    pub(crate) downstream_key: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Checked {
    pub(crate) violations: Vec<String>,
    /// Charges that the outside has recognized by their key.
    pub(crate) deduplicated: usize,
}

pub(crate) fn check(calls: &[Call], after: &Aftermath, parts: &[Part]) -> Checked {
    let mut checked = Checked::default();
    for (key, one) in by_key(calls, after) {
        let mut say = |what: String| checked.violations.push(format!("{key}: {what}"));
        let of_key: Vec<_> = parts.iter().filter(|part| part.key == key).collect();
        let of = |step: &str| -> Vec<_> { of_key.iter().filter(|part| part.step == step).collect() };
        let charges: HashSet<_> = of(CHARGE).iter().map(|part| &part.downstream_key).collect();
        let (rows, texts) = (of(ROW).len(), of(TEXT).len());
        for (what, count) in [("rows", rows), ("charges", charges.len()), ("texts", texts)] {
            if count != 1 {
                say(format!("{count} {what} for one operation"));
            }
        }
        if !of(OVERTAKEN).is_empty() {
            say("an overtaken attempt has committed its row".to_owned());
        }
        checked.deduplicated += of(CHARGE).len().saturating_sub(charges.len());
        one_answer_is_stored(&one, &of_key, &mut say);
        one_completion_and_no_wrong_answer(&one, &mut say);
        answers_agree(&one, &mut say);
    }
    checked.violations.sort();
    checked
}

fn one_answer_is_stored(one: &OneKey<'_>, parts: &[&Part], say: &mut impl FnMut(String)) {
    let [record] = one.records.as_slice() else { return say(format!("{} records", one.records.len())) };
    let Some(stored) = record.response.as_deref().filter(|_| record.completed) else {
        return say("left unfinished".to_owned());
    };
    // The result of each step is the name of the call that had its effect.
    let results: Vec<_> = stored.split(' ').collect();
    let have_effects = results.len() == 3
        && [ROW, CHARGE, TEXT]
            .iter()
            .zip(&results)
            .all(|(step, call)| parts.iter().any(|part| part.step == *step && part.call == *call));
    if !have_effects {
        say(format!("{stored} is stored, and a result in it has no effect"));
    }
    for call in &one.calls {
        if let Some(response) = call.response().filter(|response| *response != stored) {
            say(format!("{} got {response}, and {stored} is stored: the answer has changed", call.name));
        }
    }
}
