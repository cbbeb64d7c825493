//! The promise of marks: one effect for each key, in the transaction that marked it.

use super::{Aftermath, by_key, later_calls_see_earlier_answers, somebody_was_answered};
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
        somebody_was_answered(&one, &mut say);
        later_calls_see_earlier_answers(&one.calls, &mut say);
    }
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::violations;
    use crate::checker::{Aftermath, Effect, Stored};
    use crate::history::{Event, What, calls};

    fn found(effects: &[&str], marks: usize, answers: &[(&str, What)]) -> Vec<String> {
        let event = |(at, (call, what)): (usize, &(&str, What))| {
            let (call, key) = ((*call).to_owned(), "k".to_owned());
            let of = |at, what| Event { at, call: call.clone(), key: key.clone(), what };
            [of(2 * at as u64, What::Invoked), of(2 * at as u64 + 1, what.clone())]
        };
        let events: Vec<Event> = answers.iter().enumerate().flat_map(event).collect();
        let effect = |call: &&str| Effect { key: "k".to_owned(), call: (*call).to_owned(), downstream_key: None };
        let mark = Stored { key: "k".to_owned(), token: 1, completed: true, response: None };
        let after = Aftermath { effects: effects.iter().map(effect).collect(), records: vec![mark; marks] };
        violations(&calls(&events), &after)
    }

    fn performed(call: &str) -> What {
        What::Performed(call.to_owned())
    }

    #[test]
    fn a_mark_with_one_effect_passes() {
        let answers = [("a", performed("a")), ("b", What::Replayed("a".to_owned()))];
        assert_eq!(found(&["a"], 1, &answers), [""; 0]);
    }

    #[test]
    fn a_second_effect_of_a_mark_is_caught() {
        assert!(found(&["a", "b"], 1, &[("a", performed("a"))])[0].contains("effects"));
    }

    #[test]
    fn an_effect_that_was_acknowledged_and_is_gone_is_caught() {
        assert!(found(&[], 0, &[("a", performed("a"))])[0].contains("which is not there"));
    }

    #[test]
    fn a_mark_without_its_effect_is_caught() {
        assert!(found(&[], 1, &[])[0].contains("0 effects and 1 marks"));
    }
}
