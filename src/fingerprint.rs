//! The fingerprint: what makes two requests under one key the same request.
//!
//! `digest` has the fingerprint and compares it with a stored one. `canonical` writes a value as canonical JSON. Over
//! HTTP, `request` reads a body as it came over the wire, and `pointer` cuts parts out of it; `lexemes`
//! splits a JSON text for both.

mod body;
mod canonical;
mod digest;
mod invalid_body;
#[cfg(feature = "http")]
mod lexemes;
#[cfg(feature = "http")]
pub(crate) mod pointer;
#[cfg(feature = "http")]
pub(crate) mod request;

pub use body::Body;
pub(crate) use digest::Comparison;
pub use digest::Fingerprint;
pub use invalid_body::InvalidBody;
