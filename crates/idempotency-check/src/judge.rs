//! The verdict about a try.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use crate::client::Answer;
use crate::effects::Effect;
use crate::form::Form;

/// What the check does to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Interruption {
    /// The connection is lost before the server receives the message.
    LostBefore,
    /// The server executes the message, and the connection is lost before its answer arrives.
    LostAfter,
    /// The client hangs up while the message is on its way.
    HangUp,
    /// The service is killed while the message is on its way, and is then started again. The server still executes the
    /// message.
    Killed,
    /// A second request with the same key arrives while the message is on its way.
    Duplicate,
}

impl Interruption {
    /// The name of the interruption in `--only`.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// The outcome of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The effect happened once, and all final answers are the same. This verdict is not a finding.
    OneEffect,
    /// The effects are more than those of one request.
    TwoEffects,
    /// A client got a successful answer, but the effect, or a part of it, is missing.
    NoEffectButSuccess,
    /// The effect happened once, but two final answers differ, or an answer has another status or form than the answer
    /// to the undisturbed request.
    OtherAnswer,
    /// A client got no final answer in time.
    Stuck,
    /// The final answer is a refusal, although the same request succeeds without an interruption.
    RefusedThoughRetried,
    /// The service answered another body under the same key with success.
    NotRefused,
    /// A request that the client had cut off had an effect.
    PerformedThoughCutOff,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneEffect => "one effect",
            Self::TwoEffects => "two effects",
            Self::NoEffectButSuccess => "no effect but success",
            Self::OtherAnswer => "other answer",
            Self::Stuck => "stuck",
            Self::RefusedThoughRetried => "refused though retried",
            Self::NotRefused => "not refused",
            Self::PerformedThoughCutOff => "performed though cut off",
        })
    }
}

/// How two answers are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Compare {
    /// Compares the status, `Content-Type`, `Location`, and every byte of the body. The answer to the undisturbed
    /// request contains other values, so only the status, `Content-Type`, the presence of `Location` and the names of
    /// JSON members are compared with that answer.
    #[default]
    Body,
    /// Compares only the status, and so overlooks an answer with the id of another payment.
    Status,
}

impl Compare {
    fn same(self, one: &Answer, other: &Answer) -> bool {
        one.status == other.status && (self == Self::Status || one == other)
    }
}

/// The effect and the answer of the undisturbed request.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) effect: Effect,
    pub(crate) answer: Answer,
    /// The form of the answer. `None` if forms are not compared.
    pub(crate) form: Option<Form>,
}

impl Expected {
    /// Judges the final answers to one key, in their order, together with the effect.
    pub(crate) fn judge(&self, effect: &Effect, finals: &[&Answer], compare: Compare) -> (Verdict, String) {
        let in_place = || format!("the effect is {effect} instead of {}", self.effect);
        let Some(first) = finals.first() else {
            let stuck = if effect.exceeds(&self.effect) { Verdict::TwoEffects } else { Verdict::Stuck };
            let what = if effect.equals(&self.effect) { "the effect happened once".to_owned() } else { in_place() };
            return (stuck, format!("the client never got a final answer; {what}"));
        };
        if effect.exceeds(&self.effect) {
            return (Verdict::TwoEffects, in_place());
        }
        if !effect.equals(&self.effect) {
            let verdict = if finals.iter().any(|answer| answer.is_success()) {
                Verdict::NoEffectButSuccess
            } else {
                Verdict::RefusedThoughRetried
            };
            return (verdict, format!("the client was told {}, and {}", first.status, in_place()));
        }
        if let Some(refusal) = finals.iter().find(|answer| !answer.is_success()) {
            let detail = format!("the effect happened, and the client was told {}", refusal.status);
            return (Verdict::RefusedThoughRetried, detail);
        }
        if let Some(other) = finals.iter().find(|answer| !compare.same(first, answer)) {
            return (Verdict::OtherAnswer, difference(first, other));
        }
        if first.status != self.answer.status {
            let detail = format!("the status is {} instead of {}", first.status, self.answer.status);
            return (Verdict::OtherAnswer, detail);
        }
        if let Some(unlike) = self.form.as_ref().and_then(|form| Form::of(first).unlike(form)) {
            let detail = format!("the answer {unlike}: it is {} instead of {}", text(first), text(&self.answer));
            return (Verdict::OtherAnswer, detail);
        }
        (Verdict::OneEffect, String::new())
    }
}

fn difference(first: &Answer, other: &Answer) -> String {
    if first.status != other.status {
        return format!("the first final answer had the status {}, a later one {}", first.status, other.status);
    }
    if first.headers != other.headers {
        return format!("the headers were {:?} first, and later {:?}", first.headers, other.headers);
    }
    format!("the first final answer was {}, a later one {}", text(first), text(other))
}

fn text(answer: &Answer) -> String {
    crate::proxy::shorten(&String::from_utf8_lossy(&answer.body), 80)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effects::Reading;

    #[test]
    fn each_verdict_follows_from_the_effect_and_the_answers() {
        let zero = Reading::of(&[&["0", "0"]]);
        let effect = |after: [&str; 2]| Reading::of(&[&after]).since(&zero);
        let answer = Answer::new(201, r#"{"id":1}"#);
        let expected = Expected { effect: effect(["1", "100"]), form: Some(Form::of(&answer)), answer };
        let (created, other) = (Answer::new(201, r#"{"id":2}"#), Answer::new(201, r#"{"id":3}"#));
        let lost = Answer::new(201, r#"{"status":"processed before"}"#);
        let (refused, replayed) = (Answer::new(422, "a"), Answer::new(200, "a"));
        let cases: [(_, &[&Answer], _); 13] = [
            (["1", "100"], &[&created, &created], Verdict::OneEffect),
            (["2", "200"], &[&created, &created], Verdict::TwoEffects),
            (["2", "200"], &[], Verdict::TwoEffects),
            (["2", "200"], &[&refused], Verdict::TwoEffects),
            (["0", "0"], &[&created], Verdict::NoEffectButSuccess),
            (["1", "0"], &[&created], Verdict::NoEffectButSuccess),
            (["0", "0"], &[&refused, &created], Verdict::NoEffectButSuccess),
            (["0", "0"], &[&refused], Verdict::RefusedThoughRetried),
            (["1", "100"], &[&created, &refused], Verdict::RefusedThoughRetried),
            (["1", "100"], &[&created, &other], Verdict::OtherAnswer),
            (["1", "100"], &[&replayed, &replayed], Verdict::OtherAnswer),
            (["1", "100"], &[&lost, &lost], Verdict::OtherAnswer),
            (["1", "100"], &[], Verdict::Stuck),
        ];
        for (after, finals, verdict) in cases {
            assert_eq!(expected.judge(&effect(after), finals, Compare::Body).0, verdict, "{after:?} {finals:?}");
        }
        let by_status = expected.judge(&effect(["1", "100"]), &[&created, &other], Compare::Status);
        assert_eq!(by_status.0, Verdict::OneEffect);
        let detail = expected.judge(&effect(["1", "100"]), &[&lost], Compare::Body).1;
        let says =
            r#"the answer lacks "id", and has "status": it is {"status":"processed before"} instead of {"id":1}"#;
        assert_eq!(detail, says);
    }
}
