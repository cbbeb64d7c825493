//! The connections and transactions that the crate owns, and the COMMIT of a caller's transaction.

mod nesting;
mod own;
mod waits;

pub use nesting::commit;
pub(crate) use nesting::{Savepoint, depth, in_callers_transaction, or_prepare_again, roll_back_to};
pub(crate) use own::{Session, in_pooled_transaction};
#[cfg(feature = "http")]
pub(crate) use waits::Pauses;
pub use waits::bounded;
pub(crate) use waits::{ANSWER_TIME, Polls, PollsUntil, ended_or_closed, or_closed};
