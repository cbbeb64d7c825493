//! A step outside the database, as its closure sees it; the results of steps as text; and the reasons to refuse a step.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::outcome::encode;

pub(super) const MAX_NAME_BYTES: usize = 255;
/// Each step that is stored writes all of them again, so a large operation belongs into a table of its own.
pub(super) const MAX_STEPS: usize = 100;
pub(super) const MAX_RESULT_BYTES: usize = 64 * 1024;
pub(super) const MAX_STEPS_BYTES: usize = 256 * 1024;

/// A step outside the database, while it is performed.
#[derive(Debug)]
pub struct Step {
    pub(super) name: String,
    pub(super) downstream_key: String,
    pub(super) took_no_effect: AtomicBool,
}

impl Step {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A key for the next service, the same in every attempt of this step, and different for each step: 32 hexadecimal
    /// digits of a SHA-256 of the key, the fingerprint and the name.
    #[must_use]
    pub fn downstream_key(&self) -> String {
        self.downstream_key.clone()
    }

    /// Declares that the step took no effect, so that it may be performed again. Returns the error:
    /// `return Err(step.not_performed(error))`. **It is final**: call it only if the step ends with this error.
    ///
    /// It matters for an [at-most-once step](super::Lease::step_at_most_once), which would be in doubt otherwise.
    pub fn not_performed<E>(&self, error: E) -> E {
        self.took_no_effect.store(true, Ordering::Relaxed);
        error
    }
}

/// Why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidStep {
    /// The name is empty, too long, or contains a NUL.
    #[error("a name takes 1 to {MAX_NAME_BYTES} bytes without NUL")]
    Name,
    /// This attempt has asked for the step before, and got its result or is still performing it.
    #[error("this attempt has asked for it before; names are unique, so put the index of a loop into the name")]
    Repeated,
    /// The step was asked for inside another step of the same operation.
    #[error("it was asked for inside another step of the same operation; perform one after the other")]
    Nested,
    /// The operation has another policy.
    #[error("the operation has another policy than Policy::InSteps, so its steps would not be stored")]
    Policy,
    /// Too many steps, or too large a result.
    #[error(
        "an operation takes {MAX_STEPS} steps, a result {MAX_RESULT_BYTES} bytes, and all results \
         {MAX_STEPS_BYTES} bytes; store large values in a table of your own, and return their key"
    )]
    TooLarge,
}

/// The result of a step, from its JSON text.
pub(super) fn decoded<T: DeserializeOwned>(name: &str, result: &str) -> Result<T, Error> {
    serde_json::from_str(result)
        .map_err(|error| Error::Undecodable { step: Some(name.to_owned()), source: error.into() })
}

/// The result as JSON text.
pub(super) fn encode_result<T: Serialize + DeserializeOwned>(name: &str, value: &T) -> Result<String, Error> {
    let result = encode(value)?.body.unwrap_or_default();
    if result.len() > MAX_RESULT_BYTES {
        return Err(too_large(name));
    }
    String::from_utf8(result).map_err(|error| Error::Unencodable { source: error.into() })
}

pub(super) fn too_large(name: &str) -> Error {
    Error::InvalidStep { step: name.to_owned(), problem: InvalidStep::TooLarge }
}
