//! A serde serializer that writes canonical JSON straight into the hasher.
//!
//! Members must be sorted, so the text of an object waits in a buffer until the outermost object ends; all other text
//! goes on to the hasher. There is no tree of values in between, so features that other crates turn on in serde_json
//! cannot change the outcome.
//!
//! Each file uses those before it: `number`, `members` and `text`, then `writer`, then `array` and `object`, then
//! `serializer`.

mod array;
mod members;
mod number;
mod object;
mod serializer;
mod text;
mod writer;

pub(super) use writer::CanonicalJson;
