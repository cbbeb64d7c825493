//! Why a body has no fingerprint.

use std::fmt::Display;

use serde::ser;

/// Why a body has no fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidBody {
    /// NaN or an infinity. JSON has no such number, and serde_json would write `null`, so the body would have the
    /// fingerprint of `null`.
    #[error("the body holds NaN or an infinity, which JSON cannot express; send null or a string in its place")]
    NotFinite,
    /// One object has two members of the same name, and parsers differ in which of them they read.
    #[error("the body holds two members named {0:?} in one object; take the raw bytes' fingerprint if this must pass")]
    DuplicateMember(String),
    /// A map's key is neither a string, a character, an integer, a boolean nor a unit variant.
    #[error("the body holds a map whose key is no string; JSON has only strings there")]
    KeyIsNoString,
    /// A `serde_json::value::RawValue`. To make its text canonical, it would have to be parsed, and numbers would lose
    /// digits.
    #[error("the body holds raw JSON text, which has no canonical form; take the fingerprint of its bytes")]
    RawJson,
    /// The value's own [`Serialize`](serde::Serialize) failed.
    #[error("the body cannot be serialized: {0}")]
    Serialize(String),
}

#[cfg(feature = "http")]
impl InvalidBody {
    /// A body that is not JSON.
    pub(super) fn not_json(error: serde_json::Error) -> Self {
        Self::Serialize(error.to_string())
    }
}

impl ser::Error for InvalidBody {
    fn custom<T: Display>(message: T) -> Self {
        Self::Serialize(message.to_string())
    }
}
