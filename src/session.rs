//! The connections and transactions that the crate owns, and the COMMIT of a caller's transaction.

mod bounded;
mod commit;
mod own;
#[cfg(feature = "http")]
mod owned;
mod poll;
mod pooled;
mod savepoint;

pub(crate) use bounded::{ANSWER, answered, or_closed};
pub use commit::commit;
pub(crate) use own::{
    Attempt, COMMIT_OUTERMOST, NotBegun, Opening, begin_and_lend, commit_outermost, in_any_transaction,
    in_own_transaction,
};
#[cfg(feature = "http")]
pub(crate) use owned::{begin_pooled, commit_unclaimed};
pub(crate) use poll::{Polls, jittered};
pub(crate) use pooled::{Connections, in_pooled_transaction};
pub(crate) use savepoint::Savepoint;
