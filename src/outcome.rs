//! The outcome of a call, and the stored form of its response.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::Error;
use crate::limits::LARGEST_RESPONSE;

/// The response of a call, and whether this call performed the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the response is inside; `into_inner` takes it out"]
pub enum Outcome<T> {
    /// This call performed the operation.
    Performed(T),
    /// An earlier call performed the operation with this response.
    Replayed(T),
}

impl<T> Outcome<T> {
    /// The response, whether this call or an earlier call performed the operation.
    #[must_use]
    pub fn into_inner(self) -> T {
        match self {
            Self::Performed(response) | Self::Replayed(response) => response,
        }
    }

    /// Whether an earlier call performed the operation. Over HTTP, send a replayed response with
    /// `Idempotent-Replayed: true`.
    #[must_use]
    pub fn is_replayed(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }
}

/// The decision about the writes of an isolated `perform`. The response is stored with either decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict<T> {
    /// Keep the writes.
    Keep(T),
    /// Undo the writes. Use `Undo` for a deterministic failure, such as "card declined", that every retry should get.
    Undo(T),
}

/// A response as its record stores it. Usually, the response is a body of JSON text. Over HTTP, the response has a
/// status, headers and a body. If the headers and the body must not be stored, the record contains only the status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    pub(crate) status: Option<i16>,
    pub(crate) headers: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
}

impl StoredResponse {
    /// Reads the three columns of the response.
    pub(crate) fn of(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            status: row.try_get("response_status")?,
            headers: row.try_get("response_headers")?,
            body: row.try_get("response_body")?,
        })
    }
}

/// Encodes a response, and decodes it again, because a response that cannot be replayed must not commit. (For example,
/// `skip_serializing` loses a field. Without this check, every retry would get `Undecodable` until the key expires.) A
/// response that is too large ends here, because the server would cut the connection, and the caller would try again.
pub(crate) fn encode<T: Serialize + DeserializeOwned>(response: &T) -> Result<StoredResponse, Error> {
    let encoded = to_json(response)?;
    if encoded.len() > LARGEST_RESPONSE {
        let source = format!("the JSON text has {} bytes, and a record stores at most 256 MiB", encoded.len());
        return Err(Error::Unencodable { source: source.into() });
    }
    serde_json::from_slice::<T>(&encoded).map_err(unencodable)?;
    Ok(StoredResponse { body: Some(encoded), ..StoredResponse::default() })
}

pub(crate) fn to_json<T: Serialize + ?Sized>(response: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(response).map_err(unencodable)
}

fn unencodable(error: serde_json::Error) -> Error {
    Error::Unencodable { source: error.into() }
}

pub(crate) fn decode<T: DeserializeOwned>(response: &StoredResponse) -> Result<T, Error> {
    serde_json::from_slice(response.body.as_deref().unwrap_or_default())
        .map_err(|error| Error::Undecodable { step: None, source: error.into() })
}

/// Returns the kind and the column of an error. The error's own text would quote the value, which may be confidential.
pub(crate) fn unquoted(error: &serde_json::Error) -> String {
    format!("{:?} error at column {}", error.classify(), error.column())
}
