//! The owner of a lease: which claim it is, and until when it lasts by the owner's own clock.

use std::sync::Arc;

use super::renewal::Deadline;
use crate::{Body, Fingerprint, InvalidBody, Key};

/// What a lease is about, to look at. Settling it is for the [`Lease`](super::Lease) alone.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    pub(crate) token: i64,
    pub(crate) attempt: u32,
    pub(super) deadline: Arc<Deadline>,
}

impl Owner {
    #[cfg(feature = "http")]
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn downstream_key(&self) -> String {
        self.key.downstream(self.fingerprint.as_bytes())
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.deadline.is_past()
    }
}

/// A key for the next service, the same in every attempt of an operation: 32 hexadecimal digits of a SHA-256 of the key and
/// the fingerprint. A gateway that dedupes by it sees one operation, however many attempts there are; and an operator who
/// looks up what became of an indeterminate one finds it under this key.
///
/// It does not outlive the retention in meaning: the same key with the same body is a new operation then, and derives the
/// same key for a gateway that may remember longer.
///
/// # Errors
///
/// [`InvalidBody`] where the body has no fingerprint.
pub fn downstream_key<B: Body + ?Sized>(key: &Key, body: &B) -> Result<String, InvalidBody> {
    Ok(key.downstream(body.fingerprint()?.as_bytes()))
}
