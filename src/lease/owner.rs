//! The owner of a lease: which claim it is, and until when it lasts by the owner's own clock.

use std::sync::Arc;

use super::renewal::Deadline;
use crate::{Fingerprint, Key};

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
        super::derive_downstream_key(&self.key, self.fingerprint.as_bytes())
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.deadline.is_past()
    }
}
