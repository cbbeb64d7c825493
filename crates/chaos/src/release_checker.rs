//! What is promised beside a newer release: that what that one alone can read is neither performed nor replayed here.

use crate::checker::{
    Aftermath, by_key, effect_and_record_agree, later_calls_see_earlier_answers, somebody_was_answered, told_the_truth,
};
use crate::history::{Call, What};

/// Before the name of a call: one of a newer release.
pub(crate) const NEWER: &str = "newer-";
/// Likewise, of one that leaves what only the newer release can read.
pub(crate) const NEWER_ONLY: &str = "newer-only-";
/// What a caller is told before the migration.
pub(crate) const SCHEMA_MISSING: &str = "schema missing";

/// Transaction mode, every key remembered to the end and asked for until somebody got a response, of either release.
pub(crate) fn violations_beside_a_newer_release(calls: &[Call], after: &Aftermath) -> Vec<String> {
    let mut all = Vec::new();
    for (key, one) in by_key(calls, after) {
        let mut say = |what: String| all.push(format!("{key}: {what}"));
        effect_and_record_agree(&one, &mut say);
        let mut written_by = one.records.iter().filter_map(|record| record.response.as_deref());
        let newer_only = written_by.any(|call| call.starts_with(NEWER_ONLY));
        for call in &one.calls {
            let name = &call.name;
            match &call.end {
                What::Barred(why) if one.has_effect_of(name) => {
                    say(format!("{name} was told: {why}, and has an effect"))
                }
                What::Barred(why) if newer_only || why == SCHEMA_MISSING => {}
                _ => told_the_truth(call, &one, &mut say),
            }
            if newer_only && call.response().is_some() && !name.starts_with(NEWER) {
                say(format!("{name} was answered by a record which a newer release has written"));
            }
        }
        somebody_was_answered(&one, &mut say);
        later_calls_see_earlier_answers(&one.calls, &mut say);
    }
    all.sort();
    all
}
