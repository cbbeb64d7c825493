//! The connections and transactions that the crate owns, and the COMMIT of a caller's transaction.

mod commit;
mod deployment;
mod own;
#[cfg(feature = "http")]
mod owned;
mod poll;
mod pooled;
mod savepoint;

pub use commit::commit;
pub use deployment::Deployment;
pub(crate) use own::{Attempt, NotBegun, Opening, begin_and_lend, in_any_transaction, in_own_transaction};
#[cfg(feature = "http")]
pub(crate) use owned::{begin_pooled, commit_unclaimed};
pub(crate) use poll::{Polls, jittered};
pub(crate) use pooled::{Connections, in_pooled_transaction};
pub(crate) use savepoint::Savepoint;
