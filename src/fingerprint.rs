//! The fingerprint: what makes two requests under one key the same request.
//!
//! `digest` has the fingerprint and compares it with a stored one. `canonical` turns a JSON text into canonical JSON.
//! `pointer` names the parts of a body that a service leaves out.

mod canonical;
mod digest;
#[cfg(feature = "http")]
pub(crate) mod pointer;

pub(crate) use digest::Comparison;
pub use digest::{Body, Fingerprint, InvalidBody};
