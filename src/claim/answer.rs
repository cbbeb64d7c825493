//! The answer to a claim that met a record: the table of DESIGN.md as a function.

use std::time::Duration;

use crate::fingerprint::Comparison;
use crate::outcome::StoredResponse;
use crate::record::{Found, Terms, are_used_up};
use crate::state::State;
use crate::{Error, Incompatible, Key, Misuse, Mode};

/// The `retry_after` without a lease, when it is unknown how long the owner will take. Transactions are short, and one
/// retry per second is a small load. The refusals of the HTTP layer that concern no key have the same `Retry-After`.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What a call does with the record that it met.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Take the claim over, as the attempt with this number.
    TakeOver { attempt: i32 },
    /// Return this response.
    Replay(StoredResponse),
}

/// Decides as the table of DESIGN.md does: the first row that matches gives the answer.
///
/// An expired record is ignored in any mode and state, so that no answer depends on when a sweep runs. An open claim of
/// this transaction is the exception: no sweep sees its record, and a second claim would perform the operation twice in
/// one transaction. If the call sees a record, `KeyReused` comes before `InFlight`, so that a client learns of its
/// mistake without a wait.
pub(crate) fn answer(found: Found, terms: &Terms, key: &Key) -> Result<Answer, Error> {
    if terms.mode == Mode::Transaction && found.is_open_claim_of_this_transaction {
        return Err(Error::Misuse(Misuse::AlreadyInTransaction));
    }
    if found.state == State::Expired {
        return Ok(Answer::TakeOver { attempt: 1 });
    }
    let mode = found.mode.clone()?;
    if !may_follow(&found, mode, terms.mode) {
        return Err(Error::OtherMode { key: key.clone(), stored: mode, asked: terms.mode });
    }
    let comparison = match (&terms.fingerprint, &found.fingerprint) {
        (Some(asked), Some(stored)) => asked.compare(stored),
        // Marks have no fingerprint.
        (None, None) => Comparison::Same,
        _ => Comparison::Other,
    };
    match found.state {
        // The first claim ended before its work began, so its request had no effect.
        State::Released if found.attempt == 0 => return Ok(Answer::TakeOver { attempt: 1 }),
        // In transaction mode and under `AtMostOnce`, a release means that nothing took effect, so a request with
        // another body may use the key. Under `AtLeastOnce` and `InSteps`, the failed attempt may have had an effect
        // in another service, under the downstream key of its own body. That service would not recognise the downstream
        // key of another body.
        State::Released if comparison != Comparison::Same && !mode.repeats() => {
            return Ok(Answer::TakeOver { attempt: 1 });
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
        // (For an expired record, this function has already returned.)
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

/// Whether a call in the mode `asked` may use a record of the mode `stored`. A key belongs to one mode. But a service
/// may divide an operation into steps, or stop doing so, and its clients still need the answers of the older records.
fn may_follow(found: &Found, stored: Mode, asked: Mode) -> bool {
    match (stored, asked) {
        // Another service may have seen the downstream key of the operation, and would not recognise the downstream key
        // of a step. So a call in steps must not repeat this attempt. While an owner works, an error other than
        // `InFlight` could make the client choose a new key.
        (Mode::AtLeastOnce, Mode::InSteps) => {
            matches!(found.state, State::Completed | State::InFlight) || found.attempt == 0
        }
        // A call without steps would repeat the finished steps of an unfinished operation.
        (Mode::InSteps, Mode::AtLeastOnce) => found.state == State::Completed,
        _ => stored == asked,
    }
}

/// Permits the next attempt, or returns [`Error::Exhausted`]. An operator may permit one more attempt, whatever
/// `max_attempts` is.
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
