//! The steps that one attempt of an operation knows, and the results of steps as text.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{MAX_RESULT_BYTES, MAX_STEPS, MAX_STEPS_BYTES};
use crate::outcome::encode;
use crate::record::StoredSteps;
use crate::{Error, InvalidStep, Misuse};

/// The steps that one attempt knows, by their names. An attempt knows the steps that earlier attempts have stored, and
/// the steps that it has called itself.
///
/// A call of a step reads the record only if an earlier call of this step has ended without a result. The record may
/// nevertheless have the result, if a future was dropped or a COMMIT was not answered.
#[derive(Debug)]
pub(super) struct Memory(Mutex<BTreeMap<String, Entry>>);

#[derive(Debug)]
struct Entry {
    state: StepState,
    /// The size of the result that the record has, or may have. The size is set before the result is stored, so that
    /// the results of concurrent steps together stay within the limit for all results. If the attempt does not know
    /// whether the result was stored, the size stays reserved.
    bytes: usize,
}

/// The state of a step, as far as this attempt knows the step.
#[derive(Debug)]
pub(super) enum StepState {
    /// An earlier attempt has stored this result, and this attempt has not called the step.
    Stored(String),
    /// The step is being performed. For a `step_at_most_once`, `begun` is true as soon as the record may show that the
    /// step was begun.
    Performing {
        begun: bool,
    },
    Returned,
    /// The step failed, or its future was dropped. A result of the step may nevertheless have been stored.
    Ended,
    /// The step may have taken effect, and must not be performed again.
    InDoubt,
}

pub(super) enum Recalled<T> {
    Replayed(T),
    /// This call performs the step. `before` is the earlier state of the step, if this or an earlier attempt has called
    /// the step.
    Perform {
        before: Option<StepState>,
    },
}

impl Memory {
    /// Creates the memory of an attempt that has not called a step yet.
    pub(super) fn of(stored: StoredSteps) -> Self {
        let entries = stored.into_iter().map(|(name, result)| match result {
            Some(result) => (name, Entry { bytes: result.len(), state: StepState::Stored(result) }),
            None => (name, Entry { bytes: 0, state: StepState::InDoubt }),
        });
        Self(Mutex::new(entries.collect()))
    }

    #[cfg(feature = "http")]
    pub(super) fn is_empty(&self) -> bool {
        self.entries().is_empty()
    }

    /// The names of the steps that may have taken effect and have no result.
    pub(super) fn in_doubt(&self) -> Vec<String> {
        self.names_of(|state| matches!(state, StepState::InDoubt | StepState::Performing { begun: true }))
    }

    /// The names of the steps whose stored result this attempt has not used.
    pub(super) fn not_asked_for(&self) -> Vec<String> {
        self.names_of(|state| matches!(state, StepState::Stored(_)))
    }

    fn names_of(&self, which: impl Fn(&StepState) -> bool) -> Vec<String> {
        self.entries().iter().filter(|(_, step)| which(&step.state)).map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn recall<T: DeserializeOwned>(&self, name: &str) -> Result<Recalled<T>, Error> {
        let mut entries = self.entries();
        let before = match entries.get_mut(name) {
            Some(Entry { state: StepState::Performing { .. } | StepState::Returned, .. }) => {
                return Err(invalid(name, InvalidStep::Repeated));
            }
            Some(step) => match &step.state {
                StepState::Stored(result) => {
                    let value = decoded(name, result)?;
                    step.state = StepState::Returned;
                    return Ok(Recalled::Replayed(value));
                }
                StepState::InDoubt => Some(StepState::InDoubt),
                _ => Some(StepState::Ended),
            },
            None => None,
        };
        // An ended step counts towards the limit only if its result may have been stored.
        let counts =
            |other: &str, step: &Entry| other != name && (step.bytes > 0 || !matches!(step.state, StepState::Ended));
        if entries.iter().filter(|(other, step)| counts(other, step)).count() >= MAX_STEPS {
            return Err(invalid(name, InvalidStep::TooLarge));
        }
        note(&mut entries, name, StepState::Performing { begun: false });
        Ok(Recalled::Perform { before })
    }

    /// Replaces the state of a step, and keeps its size.
    pub(super) fn note(&self, name: &str, state: StepState) {
        note(&mut self.entries(), name, state);
    }

    /// Sets the size of a step to the size of its result in the record, or to zero if the record has no result.
    pub(super) fn resize(&self, name: &str, bytes: usize) {
        self.entries().entry(name.to_owned()).and_modify(|step| step.bytes = bytes);
    }

    /// Reserves the size of a result, or refuses the result if all results together would become too large.
    pub(super) fn reserve(&self, name: &str, bytes: usize) -> Result<(), Error> {
        let mut entries = self.entries();
        let others: usize = entries.iter().filter(|(other, _)| *other != name).map(|(_, step)| step.bytes).sum();
        if others + bytes > MAX_STEPS_BYTES {
            return Err(invalid(name, InvalidStep::TooLarge));
        }
        entries.entry(name.to_owned()).and_modify(|step| step.bytes = bytes);
        Ok(())
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn note(entries: &mut BTreeMap<String, Entry>, name: &str, state: StepState) {
    let bytes = entries.get(name).map_or(0, |step| step.bytes);
    entries.insert(name.to_owned(), Entry { state, bytes });
}

pub(super) fn decoded<T: DeserializeOwned>(name: &str, result: &str) -> Result<T, Error> {
    serde_json::from_str(result)
        .map_err(|error| Error::Undecodable { step: Some(name.to_owned()), source: error.into() })
}

pub(crate) fn encode_result<T: Serialize + DeserializeOwned>(name: &str, value: &T) -> Result<String, Error> {
    fits_a_step(name, encode(value)?.body.unwrap_or_default())
}

/// Returns the JSON text of a result, or an error if the result is too large.
pub(super) fn fits_a_step(name: &str, result: Vec<u8>) -> Result<String, Error> {
    if result.len() > MAX_RESULT_BYTES {
        return Err(invalid(name, InvalidStep::TooLarge));
    }
    String::from_utf8(result).map_err(|error| Error::Unencodable { source: error.into() })
}

pub(super) fn invalid(step: &str, problem: InvalidStep) -> Error {
    Error::Misuse(Misuse::Step { step: step.to_owned(), problem })
}
