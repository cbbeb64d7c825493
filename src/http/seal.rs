//! Bodies that must not be in the table in plain text.

use crate::{BoxError, Key};

/// Encrypts stored bodies, with a cipher and keys of the service's own.
///
/// The key of the operation is for the cipher's associated data: a body that somebody moved to another record then does not
/// open. Each is called on the runtime's own threads: no blocking calls.
pub trait Seal: Send + Sync + 'static {
    /// Seals a body.
    ///
    /// # Errors
    ///
    /// Any: the request then ends in a 500, and nothing is committed.
    fn seal(&self, key: &Key, body: &[u8]) -> Result<Vec<u8>, BoxError>;

    /// Opens what [`seal`](Self::seal) made.
    ///
    /// # Errors
    ///
    /// Any: the repeat then gets [`NotReplayable`](super::Rejection::NotReplayable), and the error is logged. The operation
    /// is never performed again.
    fn open(&self, key: &Key, sealed: Vec<u8>) -> Result<Vec<u8>, BoxError>;
}
