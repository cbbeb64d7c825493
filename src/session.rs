//! The connections and transactions that the crate owns, and the COMMIT of a caller's transaction.

mod bounded;
mod nesting;
mod own;
mod poll;

pub use bounded::bounded;
#[cfg(feature = "http")]
pub(crate) use bounded::or_closed;
pub(crate) use bounded::{ANSWER_TIME, ended_or_closed};
pub use nesting::commit;
pub(crate) use nesting::{Savepoint, depth, in_callers_transaction, roll_back_to};
pub(crate) use own::{Opening, Session, in_pooled_transaction};
#[cfg(feature = "http")]
pub(crate) use poll::Pauses;
pub(crate) use poll::{Polls, PollsUntil};
