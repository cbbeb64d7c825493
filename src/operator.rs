//! The questions of an operator: how much is in the table, whether the set-up keeps the crate's promises, what became
//! of one key, and which records wait for a decision.
//!
//! The binary `idempotency-janitor` prints the answers, and a service may serve them.
//!
//! # Layout
//!
//! `stats` reads sizes and counts; `health` looks for warnings; `records` lists, shows and forgets single records, and
//! reads their responses. The module `record` has the statements, and the types of their rows.

mod health;
mod records;
mod stats;

pub use crate::record::{Group, Shown, ShownStep, StoredResponse, Unsettled, UnsettledPart};
pub use health::{Warning, health};
pub use records::{forget, response, show, unsettled, unsettled_part};
pub use stats::{AGES, SAMPLE, STATES, Stats, stats};
