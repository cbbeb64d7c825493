//! The owner of a lease: its claim, and its deadline by the owner's own clock.

use std::sync::Arc;

use super::renewal::Deadline;
use crate::{Body, Fingerprint, InvalidBody, Key};

/// The facts of a lease, read-only. Only the [`Lease`](super::Lease) itself completes or releases the claim.
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
        self.key.downstream(self.fingerprint.as_bytes(), "")
    }

    /// The key for the next service of one step.
    pub(super) fn downstream_key_of(&self, step: &str) -> String {
        self.key.downstream(self.fingerprint.as_bytes(), step)
    }

    /// Waits until the lease is lost.
    pub(super) async fn lost(&self) {
        self.deadline.past().await;
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.deadline.is_past()
    }
}

/// A key for the next service, the same in every attempt of an operation: 32 hexadecimal digits of a SHA-256 of the key
/// and the fingerprint. A gateway that deduplicates by it sees one operation, however many attempts there are. An
/// operator can look up an indeterminate operation there under this key.
///
/// After the retention, the same key with the same body is a new operation, with the same downstream key. A gateway
/// that remembers keys for longer than the retention would treat it as the earlier operation.
///
/// # Errors
///
/// [`InvalidBody`] if the body has no fingerprint.
pub fn downstream_key<B: Body + ?Sized>(key: &Key, body: &B) -> Result<String, InvalidBody> {
    Ok(key.downstream(body.fingerprint()?.as_bytes(), ""))
}
