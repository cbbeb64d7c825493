//! What a reconciler asks the service's look-up, and what the look-up answers.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::step::fits_a_step;
use crate::outcome::{Response, encode, unquoted};
use crate::{Error, Key};

/// An operation, or a step of one, of which nobody knows whether it took effect.
pub struct InDoubt {
    pub(super) key: Key,
    pub(super) downstream_key: String,
    pub(super) step: Option<String>,
    pub(super) attempt: u32,
    pub(super) claimed_at: DateTime<Utc>,
    pub(crate) request: Vec<u8>,
    pub(super) look: u32,
}

impl InDoubt {
    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The key under which the other service saw the operation
    /// ([`Lease::downstream_key`](super::Lease::downstream_key)), or the step
    /// ([`Step::downstream_key`](super::Step::downstream_key)).
    #[must_use]
    pub fn downstream_key(&self) -> &str {
        &self.downstream_key
    }

    /// The name of the step. `None` for an operation without steps.
    #[must_use]
    pub fn step(&self) -> Option<&str> {
        self.step.as_deref()
    }

    /// How often the operation was attempted.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// When the last attempt was claimed, by the database's clock.
    #[must_use]
    pub fn claimed_at(&self) -> DateTime<Utc> {
        self.claimed_at
    }

    /// The number of this look: 1 for the first.
    #[must_use]
    pub fn look(&self) -> u32 {
        self.look
    }

    /// The stored request of a call of the library. One of a leased layer is no JSON: see `InDoubt::http_request`.
    ///
    /// # Errors
    ///
    /// [`Error::Undecodable`]. Its text quotes nothing of the request, which may be confidential.
    pub fn request<B: DeserializeOwned>(&self) -> Result<B, Error> {
        serde_json::from_slice(&self.request).map_err(|error| {
            let source = unquoted(&error);
            Error::Undecodable { step: None, source: source.into() }
        })
    }
}

/// The stored request is left out, because it is confidential.
impl fmt::Debug for InDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InDoubt")
            .field("key", &self.key)
            .field("step", &self.step)
            .field("attempt", &self.attempt)
            .field("claimed_at", &self.claimed_at)
            .field("look", &self.look)
            .finish_non_exhaustive()
    }
}

/// What a look-up has found.
#[derive(Debug)]
#[non_exhaustive]
pub enum Finding {
    /// It took effect, with this answer. The answer is stored at once, and every retry gets it.
    TookEffect(Effect),
    /// The other service has no trace of it. A request may still be on its way, so only several looks that found none
    /// release the operation.
    NoTrace,
    /// The other service does not know yet. It is asked again later, and the looks without a trace are counted anew.
    Unknown,
}

impl Finding {
    /// It took effect: `answer` is what the work, or the step, would have returned. Its type must be the same.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] if a retry could not decode the answer.
    pub fn took_effect<T: Serialize + DeserializeOwned>(answer: &T) -> Result<Self, Error> {
        Ok(Self::TookEffect(Effect(encode(answer)?)))
    }

    #[cfg(feature = "http")]
    pub(crate) fn of_response(response: Response) -> Self {
        Self::TookEffect(Effect(response))
    }

    /// The name, as in metrics and in [`ShownLooks::finding`](crate::operator::ShownLooks::finding).
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::TookEffect(_) => "took_effect",
            Self::NoTrace => "no_trace",
            Self::Unknown => "unknown",
        }
    }
}

/// An answer that can be stored: see [`Finding::took_effect`].
#[derive(Debug)]
pub struct Effect(pub(super) Response);

impl Effect {
    /// The result of a step, as JSON text.
    pub(super) fn of_step(&self, name: &str) -> Result<String, Error> {
        if self.0.status.is_some() {
            return Err(Error::Unencodable {
                source: "the result of a step is a JSON value, and no HTTP response".into(),
            });
        }
        fits_a_step(name, self.0.body.clone().unwrap_or_default())
    }
}
