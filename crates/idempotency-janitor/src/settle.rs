//! `resolve`, `release`, `grant` and `forget`: an operator decides about one key.
//!
//! Each command first reads the record, and shows the record before it asks for a confirmation. The command settles the
//! record only if the record has not changed since.

use std::io::{BufRead as _, IsTerminal as _, Write as _, stderr, stdin};

use chrono::{DateTime, Utc};
use pg_idempotency::operator::{Shown, State};
use pg_idempotency::{DEFAULT_RETENTION, Key, Mode, SettleError};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::arguments::{Answer, KeyArguments, Resolve, ResponseArguments};
use crate::connection::{ANSWER, Database, ask, look};
use crate::failure::Failure;
use crate::keys::{as_arguments, in_text, names_in_doubt, seen};
use crate::process::{Ending, json_line, print};
use crate::time::{moment, span};

const EXPIRED: &str = "the key is new again, and the next call performs the operation";

/// The finding of an operator about a key.
pub(crate) enum Decision {
    /// The operation took effect, and returned this response.
    Resolve {
        response: Box<RawValue>,
    },
    /// This step in doubt took effect, and returned this result.
    ResolveStep {
        step: String,
        result: Box<RawValue>,
    },
    /// This step in doubt took no effect.
    ReleaseStep {
        step: String,
    },
    /// The operation, or its only step in doubt, took no effect.
    Release,
    /// The cause of the operation's failures is repaired, so one more attempt is permitted.
    Grant,
    Forget,
}

impl Decision {
    /// Returns an error if this record cannot be settled in this way.
    pub(crate) fn check(&self, shown: &Shown) -> Result<(), Failure> {
        if let Some(left) = shown.lease_left {
            return Err(Failure::Leased { left });
        }
        let refused = |why| Err(Failure::NotToBeSettled { state: shown.state, why });
        if !matches!(self, Self::Forget) && shown.completed_at.is_some() {
            return refused("a completed operation cannot be settled; to have it performed again, forget the key");
        }
        match self {
            Self::Resolve { .. } if shown.attempt == 0 => {
                refused("no attempt has begun, so nothing took effect; the next call performs the operation")
            }
            Self::Resolve { .. } => match &names_in_doubt(shown)[..] {
                [] => Ok(()),
                steps => Err(Failure::StepsInDoubt { steps: steps.to_vec() }),
            },
            _ if shown.state == State::Expired && !matches!(self, Self::Forget) => refused(EXPIRED),
            Self::ResolveStep { step, .. } | Self::ReleaseStep { step } => {
                let not_in_doubt = |why| Err(Failure::StepNotInDoubt { step: step.clone(), why });
                match shown.steps.iter().find(|stored| stored.name == *step) {
                    None => not_in_doubt("the record has no step of this name"),
                    Some(stored) if !stored.in_doubt => not_in_doubt("its result is stored"),
                    Some(_) => Ok(()),
                }
            }
            Self::Release if shown.state == State::Released => refused(
                "the next call performs the operation; if that call is refused as exhausted, grant another attempt, or \
                 resolve the key",
            ),
            Self::Grant if shown.mode == Mode::Transaction || shown.attempt == 0 => {
                refused("its attempts are not counted")
            }
            Self::Grant if !matches!(shown.state, State::Released | State::Lapsed) => {
                refused("only a released or lapsed operation gets another attempt; settle what is indeterminate first")
            }
            // The steps may have had different outcomes.
            Self::Release if names_in_doubt(shown).len() > 1 => {
                Err(Failure::StepsInDoubt { steps: names_in_doubt(shown) })
            }
            Self::Release | Self::Grant | Self::Forget => Ok(()),
        }
    }

    /// Joins the decision to the record that was shown. Returns an error if the record cannot be settled in this way.
    pub(crate) fn about(self, shown: Shown) -> Result<Agreed, Failure> {
        self.check(&shown)?;
        Ok(Agreed { decision: self, shown })
    }
}

/// A decision that the record allows, about the claim that was shown.
pub(crate) struct Agreed {
    decision: Decision,
    shown: Shown,
}

impl Agreed {
    pub(crate) fn shown(&self) -> &Shown {
        &self.shown
    }

    /// The text before a confirmation: the consequence of the decision, and the question.
    pub(crate) fn means(&self) -> String {
        let Self { decision, shown } = self;
        let in_doubt = names_in_doubt(shown);
        let consequence = match decision {
            Decision::Resolve { response } => format!(
                "This decides that the operation took effect: each retry gets this response of {} bytes for \
                 {}, and nothing is performed. Resolve it?",
                response.get().len(),
                span(DEFAULT_RETENTION.max(shown.retention_left))
            ),
            Decision::ResolveStep { step, result } => format!(
                "This decides that the step {step:?} took effect: its result is these {} bytes, and {}. Resolve \
                 it?",
                result.get().len(),
                follows(shown, step, "the next call with this key continues after it")
            ),
            Decision::ReleaseStep { step } => took_no_effect(shown, step),
            Decision::Release => match &in_doubt[..] {
                [step] => took_no_effect(shown, step),
                _ if shown.steps.is_empty() => {
                    "This decides that the operation took no effect: the next call with this key performs it. Release \
                     it?"
                    .to_owned()
                }
                _ => "The next call with this key performs the operation, except for the steps that are \
                      finished. Release it?"
                    .to_owned(),
            },
            Decision::Grant => format!(
                "The next call with this key, or a resumer, makes attempt {}, whatever the service's limit is. Permit \
                 it?",
                shown.attempt + 1
            ),
            Decision::Forget => {
                let steps = match (shown.steps.is_empty(), in_doubt.is_empty()) {
                    (true, _) => String::new(),
                    (false, true) => ", with all of its steps".to_owned(),
                    (false, false) => format!(", with all of its steps, and those in doubt are {in_doubt:?}"),
                };
                format!("Forgetting it means that the next call with this key is performed again{steps}. Forget it?")
            }
        };
        match (decision, shown.lease_until) {
            // A look-up proves nothing about a request that the owner sent afterwards.
            (Decision::Release | Decision::ReleaseStep { .. } | Decision::Forget, Some(lapsed)) => format!(
                "The lease lapsed at {}. If you looked the key up at the other service before that time, look again. \
                 {consequence}",
                moment(lapsed)
            ),
            _ => consequence,
        }
    }

    /// Settles the record if it is still as it was shown. Returns a line for the log.
    pub(crate) async fn carry_out(self, pool: &PgPool, reason: &str) -> Result<String, Failure> {
        Ok(self.settle(pool, reason).await?.in_text())
    }

    async fn settle(self, pool: &PgPool, reason: &str) -> Result<Settled, Failure> {
        let Self { decision, shown } = self;
        let before = shown.clone();
        let (decision, step) = match decision {
            Decision::Resolve { response } => {
                // If the record's own retention ends later than the default retention, the record keeps its own.
                decided(shown.resolve(pool, &response, DEFAULT_RETENTION)).await?;
                ("resolved", None)
            }
            Decision::ResolveStep { step, result } => {
                decided(shown.step(&step).resolve(pool, &result)).await?;
                ("resolved", Some(step))
            }
            Decision::ReleaseStep { step } => {
                decided(shown.step(&step).release(pool, reason)).await?;
                ("released", Some(step))
            }
            Decision::Release => {
                decided(shown.release(pool, reason)).await?;
                ("released", None)
            }
            Decision::Grant => {
                decided(shown.grant(pool, reason)).await?;
                ("granted", None)
            }
            Decision::Forget => {
                decided(shown.forget(pool)).await?;
                ("forgotten", None)
            }
        };
        Ok(Settled { at: Utc::now(), decision, step, before, reason: reason.to_owned() })
    }
}

/// Waits for a decision. A connection that is lost during the COMMIT does not show whether the decision was made.
async fn decided<R>(deciding: impl Future<Output = Result<R, SettleError>>) -> Result<(), Failure> {
    match ask(ANSWER, deciding).await {
        Ok(_) => Ok(()),
        Err(Failure::Connection(cause)) => Err(Failure::LostInDecision(cause)),
        Err(failure) => Err(failure),
    }
}

/// A decision that was carried out.
struct Settled {
    /// The time is a part of the report, because the database does not store the time of each decision.
    at: DateTime<Utc>,
    decision: &'static str,
    /// The step that was settled, if the decision was not about the whole operation.
    step: Option<String>,
    /// The record before the decision.
    before: Shown,
    /// The database does not store the reason for `resolve` and `forget`.
    reason: String,
}

impl Settled {
    /// A line for a log, without the whole value of the key.
    fn in_text(&self) -> String {
        let Self { decision, before, reason, .. } = self;
        let of = named(before);
        let Some(step) = &self.step else {
            return format!("{decision}: {of}, which was {}, because {reason}", before.state);
        };
        let left = match &others(before, step)[..] {
            [] => "which is released".to_owned(),
            others => format!("which still waits for {others:?}"),
        };
        let downstream_key = before.downstream_key_of_step(step).unwrap_or_default();
        format!("{decision}: the step {step:?} with downstream key {downstream_key} of {of}, {left}, because {reason}")
    }

    fn in_json(&self) -> Value {
        let Self { at, decision, step, before, reason } = self;
        let of_step = |step| json!({"name": step, "downstream_key": before.downstream_key_of_step(step)});
        json!({
            "at": at.to_rfc3339(),
            "decision": decision,
            "scope": before.key.scope(),
            "operation": before.key.operation(),
            "value": before.key.value(),
            // The token is a string, as in the output of `show`.
            "token": before.token.to_string(),
            "downstream_key": before.downstream_key,
            "state_before": before.state.to_string(),
            "step": step.as_deref().map(of_step),
            "steps_left_in_doubt": step.as_deref().map(|step| others(before, step)).unwrap_or_default(),
            "reason": reason,
        })
    }
}

pub(crate) async fn resolve(database: &Database, arguments: Resolve) -> Result<Ending, Failure> {
    let Resolve { key, response, step, reason, answer } = arguments;
    let key = key.key()?;
    let response = read(response)?;
    let decision = match step {
        Some(step) => Decision::ResolveStep { step, result: response },
        None => Decision::Resolve { response },
    };
    settle(database, key, decision, &reason, &answer).await
}

pub(crate) async fn release(
    database: &Database,
    arguments: KeyArguments,
    step: Option<String>,
    reason: &str,
    answer: &Answer,
) -> Result<Ending, Failure> {
    let decision = step.map_or(Decision::Release, |step| Decision::ReleaseStep { step });
    settle(database, arguments.key()?, decision, reason, answer).await
}

pub(crate) async fn settle(
    database: &Database,
    key: Key,
    decision: Decision,
    reason: &str,
    answer: &Answer,
) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    let shown = look(&pool, &key).await?;
    // A decision under `--seen` is about the record that `show` printed. Another attempt may have begun since, or an
    // owner that was in flight may have died after its last request.
    if answer.seen.as_ref().is_some_and(|printed| *printed != seen(&shown)) {
        return Err(Failure::Changed);
    }
    let agreed = decision.about(shown)?;
    if answer.seen.is_none() {
        confirm(&agreed)?;
    }
    let settled = agreed.settle(&pool, reason).await?;
    let receipt = if answer.output.json {
        json_line(&settled.in_json())
    } else {
        format!("{} {}\n", settled.at.to_rfc3339(), settled.in_text())
    };
    // The decision is made. A non-zero exit code would be wrong, even if the disk is full and the line cannot be
    // written.
    if print(&receipt).is_err() {
        let _ = stderr().write_all(receipt.as_bytes());
    }
    Ok(Ending::Done)
}

/// The steps in doubt except `step`.
fn others(shown: &Shown, step: &str) -> Vec<String> {
    names_in_doubt(shown).into_iter().filter(|other| other != step).collect()
}

/// The consequence of settling a step. No caller continues while other steps are in doubt.
fn follows(shown: &Shown, step: &str, if_last: &str) -> String {
    match &others(shown, step)[..] {
        [] => if_last.to_owned(),
        others => format!("no call continues before these steps in doubt are settled, too: {others:?}"),
    }
}

fn took_no_effect(shown: &Shown, step: &str) -> String {
    let follows = follows(shown, step, "the next call with this key performs it");
    format!("This decides that the step {step:?} took no effect: {follows}. Steps that are finished stay. Release it?")
}

/// Keeps the response byte by byte, because a parsed number would lose digits, and a parsed object would lose its
/// order.
fn read(response: ResponseArguments) -> Result<Box<RawValue>, Failure> {
    let text = match (response.response, response.response_file) {
        (_, Some(path)) => std::fs::read_to_string(&path).map_err(|source| Failure::ResponseFile { path, source })?,
        (text, None) => text.unwrap_or_default(),
    };
    json(&text)
}

pub(crate) fn json(text: &str) -> Result<Box<RawValue>, Failure> {
    serde_json::from_str(text).map_err(|source| Failure::NotJson {
        line: source.line(),
        column: source.column(),
        source,
    })
}

/// Asks for a confirmation on a terminal. Without a terminal, the decision is not confirmed.
fn confirm(agreed: &Agreed) -> Result<(), Failure> {
    if !stdin().is_terminal() {
        return Err(Failure::NotConfirmed);
    }
    let Agreed { shown, .. } = agreed;
    let question = format!("{}\n{}\n{} [y/N] ", as_arguments(shown), in_text(shown), agreed.means());
    stderr().write_all(question.as_bytes()).map_err(Failure::Output)?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer).map_err(Failure::Output)?;
    if matches!(answer.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(Failure::NotConfirmed) }
}

/// Describes the key for the log of decisions. The log contains only the beginning of a value. Two values may begin
/// alike, so the token identifies the claim that was settled. The downstream key helps to find the operation in the
/// provider's log.
fn named(shown: &Shown) -> String {
    let key = &shown.key;
    let (value, bytes) = (beginning(key.value()), key.value().len());
    let downstream_key = shown.downstream_key.as_ref().map(|key| format!(", downstream key {key}")).unwrap_or_default();
    format!(
        "scope {:?}, operation {:?}, value {:?} ({bytes} bytes), token {}{downstream_key}",
        key.scope(),
        key.operation(),
        format!("{value}…"),
        shown.token
    )
}

/// The first four bytes of a value of at least sixteen bytes, so that the rest keeps enough entropy. A shorter value is
/// not shown. The whole value would give access to the response.
pub(crate) fn beginning(value: &str) -> &str {
    let shown = if value.len() >= 16 { value.floor_char_boundary(4) } else { 0 };
    &value[..shown]
}
