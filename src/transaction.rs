//! Transaction mode: the effect and its response commit together, once for each key.

mod call;
mod ensure;
mod options;

#[cfg(feature = "http")]
pub(crate) use call::{Call, Won};
pub use ensure::ensure_idempotent;
pub use options::Idempotency;
