//! Why a body has no fingerprint.

use std::fmt::Display;

/// Why a body has no fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidBody {
    /// The body that came over the wire is not JSON.
    #[error("the body is not JSON: {0}")]
    NotJson(String),
    /// serde_json cannot write the value: a map's key is no string, or the value's own
    /// [`Serialize`](serde::Serialize) failed.
    #[error("the body cannot be serialized: {0}")]
    Serialize(String),
}

impl InvalidBody {
    #[cfg(feature = "http")]
    pub(super) fn not_json(error: impl Display) -> Self {
        Self::NotJson(error.to_string())
    }

    pub(super) fn serialize(error: impl Display) -> Self {
        Self::Serialize(error.to_string())
    }
}
