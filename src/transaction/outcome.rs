//! What a call gives back when it succeeds, and how a response is stored.

mod faithful;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::record::Response;
use faithful::Faithful;

/// The response, and whether this call made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the response is inside; `into_inner` takes it out"]
pub enum Outcome<T> {
    /// This call performed the operation.
    Performed(T),
    /// An earlier call did; this is its response.
    Replayed(T),
}

impl<T> Outcome<T> {
    /// The response, whichever call made it.
    #[must_use]
    pub fn into_inner(self) -> T {
        match self {
            Self::Performed(response) | Self::Replayed(response) => response,
        }
    }

    /// Whether an earlier call performed the operation: over HTTP, whether to send `Idempotency-Replayed: true`.
    #[must_use]
    pub fn is_replayed(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }
}

/// What becomes of the writes of an isolated `perform`. Its response is stored either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict<T> {
    /// Keep what was written.
    Keep(T),
    /// Undo what was written: a deterministic failure, such as "card declined", that every repeat should get too.
    Undo(T),
}

/// Encodes a response, and reads it back: what cannot be replayed must not commit. (`skip_serializing` loses a field: without
/// this, every repeat would be undecodable for as long as the key is remembered.)
pub(crate) fn encode<T: Serialize + DeserializeOwned>(response: &T) -> Result<Response, Error> {
    let encoded = to_json(response)?;
    serde_json::from_slice::<T>(&encoded).map_err(unencodable)?;
    Ok(Response { body: Some(encoded), ..Response::default() })
}

/// The response as it is stored, unless it would come back as another one.
pub(crate) fn to_json<T: Serialize + ?Sized>(response: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(&Faithful::new(response)).map_err(unencodable)
}

fn unencodable(error: serde_json::Error) -> Error {
    Error::Unencodable { source: error.into() }
}

pub(crate) fn decode<T: DeserializeOwned>(response: &Response) -> Result<T, Error> {
    serde_json::from_slice(response.body.as_deref().unwrap_or_default())
        .map_err(|error| Error::Undecodable { source: error.into() })
}
