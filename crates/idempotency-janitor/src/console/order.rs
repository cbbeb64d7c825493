//! A person's decision, as a form sends it, and the record to which the decision refers.

use pg_idempotency::operator::Shown;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::keys::names_in_doubt;
use crate::settle::Decision;

pub(super) const TOOK_EFFECT: &str = "took_effect";

/// A person's decision. The form on the page of a key sends the decision. Then the form on the page that asks for a
/// confirmation sends the same decision again.
#[derive(Deserialize)]
pub(super) struct Order {
    /// The [`seen`](crate::keys::seen) of the record that the page showed.
    pub(super) seen: String,
    pub(super) action: String,
    #[serde(default)]
    pub(super) response: String,
    pub(super) reason: String,
    /// The name that the visitor enters. The console ignores this name if the sign-in has given a name.
    #[serde(default)]
    pub(super) operator: String,
}

impl Order {
    /// Whether the decision stores the JSON of the form.
    pub(super) fn gives_json(&self) -> bool {
        self.action.starts_with(TOOK_EFFECT)
    }
}

/// The decision that `action` names, about this record. A number after the name is the place of a step among the steps
/// in doubt. The form does not send the name of the step, because the name may contain line breaks, and a browser would
/// change them.
pub(super) fn decision(action: &str, shown: &Shown, json: Box<RawValue>) -> Option<Decision> {
    let (action, place) = action.split_once(' ').unwrap_or((action, "0"));
    let in_doubt = names_in_doubt(shown);
    let whole = in_doubt.is_empty();
    let step = in_doubt.into_iter().nth(place.parse().ok()?);
    match (action, step) {
        (TOOK_EFFECT, Some(step)) => Some(Decision::ResolveStep { step, result: json }),
        (TOOK_EFFECT, None) if whole => Some(Decision::Resolve { response: json }),
        ("no_effect", Some(step)) => Some(Decision::ReleaseStep { step }),
        ("no_effect", None) if whole => Some(Decision::Release),
        ("grant", _) => Some(Decision::Grant),
        ("forget", _) => Some(Decision::Forget),
        _ => None,
    }
}

/// The decision in a few words, for the log.
pub(super) fn in_words(decision: &Decision) -> String {
    match decision {
        Decision::Resolve { .. } => "resolved".to_owned(),
        Decision::ResolveStep { step, .. } => format!("resolved the step {step:?}"),
        Decision::Release => "released".to_owned(),
        Decision::ReleaseStep { step } => format!("released the step {step:?}"),
        Decision::Grant => "granted another attempt".to_owned(),
        Decision::Forget => "forgotten".to_owned(),
    }
}
