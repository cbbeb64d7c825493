//! The promise of marks: one effect for each key, in the transaction that marked it.

use super::{Aftermath, answers_agree, by_key};
use crate::history::{Call, What};

/// `calls` are those whose answers must be true. Under asynchronous replication these are the calls after the last
/// failover.
pub(crate) fn violations(calls: &[Call], after: &Aftermath) -> Vec<String> {
    let mut all = Vec::new();
    for (key, one) in by_key(calls, after) {
        let mut say = |what: String| all.push(format!("{key}: {what}"));
        if one.effects.len() > 1 {
            say(format!("{} effects of one mark", one.effects.len()));
        }
        if one.effects.len() != one.records.len() {
            say(format!("{} effects and {} marks", one.effects.len(), one.records.len()));
        }
        for call in &one.calls {
            match &call.end {
                What::Performed(response) | What::Replayed(response) if !one.has_effect_of(response) => {
                    say(format!("{} was told of the effect of {response}, which is not there", call.name));
                }
                What::Refused(why) if one.has_effect_of(&call.name) => {
                    say(format!("{} was refused ({why}), and has an effect", call.name));
                }
                What::Wrong(why) | What::Barred(why) => say(format!("{} was told: {why}", call.name)),
                _ => {}
            }
        }
        answers_agree(&one, &mut say);
    }
    all.sort();
    all
}
