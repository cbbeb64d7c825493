//! Anything that has a fingerprint, and why a body has none.

use std::fmt::Display;

use serde::Serialize;

use super::digest::Fingerprint;

/// A body that has a fingerprint: any [`Serialize`] value, as canonical JSON, or a [`Fingerprint`] that was made
/// before.
///
/// The trait is sealed: there are no other implementations.
pub trait Body: sealed::Sealed {
    /// The fingerprint of this body.
    ///
    /// # Errors
    ///
    /// [`InvalidBody`], as for [`Fingerprint::of_json`]. A ready fingerprint gives no error.
    fn fingerprint(&self) -> Result<Fingerprint, InvalidBody>;
}

impl<T: Serialize + ?Sized> Body for T {
    fn fingerprint(&self) -> Result<Fingerprint, InvalidBody> {
        Fingerprint::of_json(self)
    }
}

impl Body for Fingerprint {
    fn fingerprint(&self) -> Result<Fingerprint, InvalidBody> {
        Ok(*self)
    }
}

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

mod sealed {
    use super::InvalidBody;

    pub trait Sealed {
        /// The body as JSON. `None` if there is only a fingerprint of it.
        fn json(&self) -> Option<Result<Vec<u8>, InvalidBody>>;
    }

    impl<T: serde::Serialize + ?Sized> Sealed for T {
        fn json(&self) -> Option<Result<Vec<u8>, InvalidBody>> {
            Some(serde_json::to_vec(self).map_err(InvalidBody::serialize))
        }
    }

    impl Sealed for super::Fingerprint {
        fn json(&self) -> Option<Result<Vec<u8>, InvalidBody>> {
            None
        }
    }
}
