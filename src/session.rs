//! The connections and transactions that the crate owns, and the COMMIT of a caller's transaction.

mod bounded;
mod commit;
mod opening;
mod own;
#[cfg(feature = "http")]
mod owned;
mod poll;
mod savepoint;

pub(crate) use bounded::{ANSWER, answered, ended_or_closed, or_closed};
pub use commit::commit;
pub(crate) use opening::Opening;
pub(crate) use own::{COMMIT_AND_CHAIN, Session, commit_and_chain, in_pooled_transaction};
#[cfg(feature = "http")]
pub(crate) use owned::{begin_pooled, commit_unclaimed, commit_unwatched};
pub(crate) use poll::{Polls, Rests, jittered};
pub(crate) use savepoint::Savepoint;
