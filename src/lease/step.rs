//! A step outside the database, as its closure sees it, and the results of steps as text.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::MAX_RESULT_BYTES;
use crate::outcome::encode;
use crate::{Error, InvalidStep, Misuse};

/// A step outside the database, while it is performed.
#[derive(Debug)]
pub struct Step {
    name: String,
    downstream_key: String,
    pub(super) took_no_effect: AtomicBool,
}

impl Step {
    pub(super) fn new(name: &str, downstream_key: String) -> Self {
        Self { name: name.to_owned(), downstream_key, took_no_effect: false.into() }
    }

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

/// The result of a step, from its JSON text.
pub(super) fn decoded<T: DeserializeOwned>(name: &str, result: &str) -> Result<T, Error> {
    serde_json::from_str(result)
        .map_err(|error| Error::Undecodable { step: Some(name.to_owned()), source: error.into() })
}

/// The result as JSON text.
pub(crate) fn encode_result<T: Serialize + DeserializeOwned>(name: &str, value: &T) -> Result<String, Error> {
    fits_a_step(name, encode(value)?.body.unwrap_or_default())
}

/// The JSON text of a result, unless it is too large.
pub(super) fn fits_a_step(name: &str, result: Vec<u8>) -> Result<String, Error> {
    if result.len() > MAX_RESULT_BYTES {
        return Err(invalid(name, InvalidStep::TooLarge));
    }
    String::from_utf8(result).map_err(|error| Error::Unencodable { source: error.into() })
}

pub(super) fn invalid(step: &str, problem: InvalidStep) -> Error {
    Error::Misuse(Misuse::Step { step: step.to_owned(), problem })
}
