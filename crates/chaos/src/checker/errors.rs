//! The promise for callers that commit errors, and for a `perform` that ends its transaction: the call returns no
//! response, and if its claim was committed, every later caller gets *indeterminate*.

use super::{Aftermath, OneKey, answers_agree, by_key, effect_and_record_agree, told_the_truth};
use crate::history::{Call, What};
use crate::request::{APART, INDETERMINATE};

/// What such calls have left.
#[derive(Debug, Default)]
pub(crate) struct Left {
    pub(crate) violations: Vec<String>,
    /// Keys that are indeterminate.
    pub(crate) indeterminate: usize,
    /// Effects that were written outside the transaction of a claim.
    pub(crate) apart: usize,
}

/// Checks transaction mode where callers commit errors, and where `perform` ends its transaction and goes on. Its later
/// writes are counted.
pub(crate) fn left_by_committed_errors(calls: &[Call], after: &Aftermath) -> Left {
    let mut left = Left::default();
    for (key, mut one) in by_key(calls, after) {
        let mut say = |what: String| left.violations.push(format!("{key}: {what}"));
        let (apart, effects): (Vec<_>, _) = one.effects.into_iter().partition(|effect| effect.call.ends_with(APART));
        one.effects = effects;
        left.apart += apart.len();
        for name in apart.iter().filter_map(|effect| effect.call.strip_suffix(APART)) {
            if one.calls.iter().any(|call| call.response() == Some(name)) {
                say(format!("{name} was acknowledged, and has ended its transaction"));
            }
        }
        if matches!(one.records.as_slice(), [record] if !record.completed) {
            left.indeterminate += 1;
            stays_indeterminate(&one, &mut say);
            continue;
        }
        effect_and_record_agree(&one, &mut say);
        for call in &one.calls {
            told_the_truth(call, &one, &mut say);
        }
        answers_agree(&one, &mut say);
    }
    left.violations.sort();
    left
}

/// The claim is committed, and will never have a response.
fn stays_indeterminate(one: &OneKey<'_>, say: &mut impl FnMut(String)) {
    if one.effects.len() > 1 {
        let calls: Vec<_> = one.effects.iter().map(|effect| effect.call.as_str()).collect();
        say(format!("{} effects, of {}", calls.len(), calls.join(" and ")));
    }
    for call in &one.calls {
        let (name, has_effect) = (&call.name, one.has_effect_of(&call.name));
        match &call.end {
            What::Performed(_) | What::Replayed(_) => {
                say(format!("{name} was answered, and the record has no response"))
            }
            What::Refused(why) if has_effect => say(format!("{name} was refused ({why}), and has an effect")),
            What::Barred(_) if has_effect => {
                say(format!("{name} was told that it is indeterminate, and has an effect"))
            }
            What::Barred(why) if why != INDETERMINATE => say(format!("{name} was told: {why}")),
            What::Unfinished if !has_effect => say(format!("{name} has committed its effect, which is not there")),
            What::Wrong(why) => say(format!("{name} was told: {why}")),
            _ => {}
        }
    }
    let is_told = |call: &&&Call| matches!(call.end, What::Unfinished | What::Barred(_));
    let Some(first) = one.calls.iter().filter(is_told).min_by_key(|call| call.ended) else {
        return say("a record that is not completed was left behind, and nobody was told".to_owned());
    };
    for later in one.calls.iter().filter(|later| later.invoked > first.ended) {
        if !matches!(later.end, What::Barred(_) | What::Unknown(_)) {
            say(format!("{} was not told that it is indeterminate, as {} had left or seen it", later.name, first.name));
        }
    }
    if !one.calls.iter().any(|call| matches!(call.end, What::Barred(_))) {
        say("nobody was told that it is indeterminate".to_owned());
    }
}
