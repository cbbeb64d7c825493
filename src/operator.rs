//! What an operator asks and decides: how much is in the table, whether the set-up keeps the crate's promises, what
//! became of one key, which records wait for a decision, and the decision.
//!
//! The binary `idempotency-janitor` is a command line over these functions, and a service may call them itself. Each
//! takes a pool, and runs in a transaction of its own.
//!
//! [`bounded`] bounds the time of any of them.

mod health;
mod records;
mod settle;
mod stats;

pub use crate::record::{Fence, Group, Shown, ShownLooks, ShownRequest, ShownStep};
pub use crate::session::bounded;
pub use crate::state::State;
pub use health::{Warning, health, protected};
pub use records::{forget, show, unsettled};
pub use settle::{grant_attempt, release, release_step, resolve, resolve_step};
pub use stats::{Stats, stats};
