//! The answer to a claim that met a record: one table, read from the top.

use std::time::Duration;

use crate::fingerprint::Comparison;
use crate::outcome::Response;
use crate::record::{Found, Terms, are_used_up};
use crate::state::State;
use crate::{Error, Incompatible, Key, Misuse, Mode};

/// The default `retry_after`, if no lease shows how long the owner will take. Transactions are short, and one request a
/// second is a small load.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What to do about a record.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Take the claim over, as this attempt.
    TakeOver { attempt: i32 },
    /// Return this response.
    Replay(Response),
}

/// Reads the table of DESIGN.md from the top: the first line that matches is the answer.
///
/// An expired record is ignored, in any mode and state, so that no answer depends on when a sweep runs. *Key reused*
/// comes before *in flight*, so that a client learns of its mistake without waiting.
pub(crate) fn answer(found: Found, terms: &Terms, key: &Key) -> Result<Answer, Error> {
    if found.state == State::Expired {
        return Ok(Answer::TakeOver { attempt: 1 });
    }
    let mode = found.mode.clone()?;
    if !may_follow(&found, mode, terms.mode) {
        return Err(Error::OtherMode { key: key.clone(), stored: mode, asked: terms.mode });
    }
    let comparison = match (&terms.fingerprint, &found.fingerprint) {
        (Some(asked), Some(stored)) => asked.compare(stored),
        // Marks have none.
        (None, None) => Comparison::Same,
        _ => Comparison::Other,
    };
    match found.state {
        // The first claim ended before its work began, so nothing of its body has taken effect.
        State::Released if found.attempt == 0 => return Ok(Answer::TakeOver { attempt: 1 }),
        // Such a release says that nothing took effect. In a mode that repeats, the failed attempt may have had an
        // effect under the downstream key of its own body. With another body, the other service would not recognise it.
        State::Released if comparison != Comparison::Same && !mode.repeats() => {
            return Ok(Answer::TakeOver { attempt: 1 });
        }
        // The owner is this transaction, which is not gone.
        State::Indeterminate if mode == Mode::Transaction && found.claimed_by_this_transaction => {
            return Err(Error::Misuse(Misuse::AlreadyInTransaction));
        }
        _ => {}
    }
    match comparison {
        Comparison::Same => {}
        Comparison::Other => return Err(Error::KeyReused { key: key.clone() }),
        Comparison::UnknownVersion(version) => {
            return Err(Error::Incompatible(Incompatible::UnknownFingerprint { version }));
        }
    }
    match found.state {
        State::Completed | State::Mark => Ok(Answer::Replay(found.response)),
        State::InFlight => Err(Error::InFlight { retry_after: found.lease_left.unwrap_or_default() }),
        State::Released | State::Lapsed => next_attempt(&found, terms),
        // (An expired record has its answer above.)
        State::Indeterminate | State::Expired => Err(Error::Indeterminate {
            attempt: found.attempt.unsigned_abs(),
            claimed_at: found.claimed_at,
            last_error: found.last_error,
            token: found.token,
            version: Box::new(found.version),
            steps: found.steps_in_doubt,
        }),
    }
}

/// A key belongs to one mode. But a service may divide an operation into steps, or no longer divide it, and then the
/// old operations come to their end.
fn may_follow(found: &Found, stored: Mode, asked: Mode) -> bool {
    match (stored, asked) {
        // The other service knows an attempt by the key of the operation, and would not recognise the key of a step.
        // While its owner works, an error that is no `InFlight` could make the client take a new key.
        (Mode::AtLeastOnce, Mode::InSteps) => {
            matches!(found.state, State::Completed | State::InFlight) || found.attempt == 0
        }
        // An unfinished operation would perform its finished steps again.
        (Mode::InSteps, Mode::AtLeastOnce) => found.state == State::Completed,
        _ => stored == asked,
    }
}

/// An operator may permit one attempt more than the limit.
fn next_attempt(found: &Found, terms: &Terms) -> Result<Answer, Error> {
    let attempts = found.attempt.unsigned_abs();
    match terms.max_attempts {
        Some(most) if are_used_up(attempts, most, found.granted_attempt.map(i32::unsigned_abs)) => {
            Err(Error::Exhausted {
                attempts,
                last_error: found.last_error.clone(),
                token: found.token,
                version: Box::new(found.version.clone()),
            })
        }
        _ => Ok(Answer::TakeOver { attempt: found.attempt.saturating_add(1) }),
    }
}
