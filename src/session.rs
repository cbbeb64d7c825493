//! The connections and transactions that the crate owns, and the COMMIT of a caller's transaction.

mod bounded;
mod commit;
mod depth;
mod own;
mod poll;
mod savepoint;

#[cfg(feature = "http")]
pub(crate) use bounded::or_closed;
pub use bounded::within;
pub(crate) use bounded::{ANSWER, ended_or_closed};
pub use commit::commit;
pub(crate) use depth::{depth, roll_back_to};
pub(crate) use own::{Opening, Session, in_pooled_transaction};
#[cfg(feature = "http")]
pub(crate) use poll::Pauses;
pub(crate) use poll::{Polls, PollsUntil, Rests, jittered};
pub(crate) use savepoint::Savepoint;
