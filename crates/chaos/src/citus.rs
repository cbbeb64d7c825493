//! A Citus cluster of the suite's own: a coordinator and two workers on 127.0.0.1, each of which can be killed, and whose
//! connections can be cut.
//!
//! # Layout
//!
//! - [`nodes`] starts the three servers, kills them and starts them again.
//! - [`effects`] is where the table of effects is: beside the keys, or where Citus does not know it.

pub(crate) mod effects;
pub(crate) mod nodes;
