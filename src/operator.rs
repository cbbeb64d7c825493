//! What an operator asks: what is in the table, whether the set-up can keep its promise, what became of one key,
//! and what waits for a decision.
//!
//! The binary `idempotency-janitor` prints these; a service may serve them.

mod health;
mod one_key;
mod stats;
mod unsettled;

pub use health::{Warning, deep_health, health, response_compression};
pub use one_key::{Shown, forget, show};
pub use stats::{AGES, Group, STATES, Stats, stats};
pub use unsettled::{Unsettled, unsettled};
