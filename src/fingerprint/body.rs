//! Anything that has a fingerprint.

use serde::Serialize;

use super::digest::Fingerprint;
use super::invalid_body::InvalidBody;

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
