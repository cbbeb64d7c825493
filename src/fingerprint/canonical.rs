//! A serde serializer that writes canonical JSON.
//!
//! The text is built in one buffer. There is no tree of values in between, so features that other crates turn on in
//! serde_json cannot change the outcome.
//!
//! Each file uses those before it: `number`, `writer`, `container`, `serializer`.

mod container;
mod number;
mod serializer;
mod writer;

pub(super) use writer::CanonicalJson;
