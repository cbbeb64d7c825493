//! Transaction mode: the effect and its response commit together, once per key.

mod begin;
mod ensure;
mod fewest;
mod isolated;
mod options;
mod protocol;

pub use ensure::{ensure_idempotent, ensure_isolated};
#[cfg(feature = "http")]
pub(crate) use fewest::{claiming, complete_and_commit};
pub use options::Idempotency;
