//! What the proofs share: the tests of the library and of its command-line tool, and the programs in `crates/`.
//!
//! - [`strict`]: the table, with the rules of a record.
//! - [`fixture`]: records in any state.
//! - [`functions`]: calls of the SQL functions.
//! - [`lease`]: leases that last, and their owners.
//! - [`cases`]: the cases of a test, none of which hides another.
//! - [`gate`]: calls that stop inside `perform`, and futures that are dropped.
//! - [`database`]: what a test writes, counts and waits for by itself.
//! - [`proxy`]: a network that counts round trips, and can vanish.
//! - [`role`]: roles that a test drops.
//! - [`child`]: processes that do not outlive their parent.

#![allow(missing_docs, reason = "the proofs are its only users; names that need no comment have none")]

pub mod cases;
pub mod child;
pub mod database;
pub mod fixture;
pub mod functions;
pub mod gate;
pub mod lease;
pub mod proxy;
pub mod role;
pub mod strict;
