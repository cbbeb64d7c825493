//! Connections and transactions: those that the crate owns, and the COMMIT of a caller's.

mod commit;
mod deployment;
mod own;
mod pooled;
mod savepoint;

pub use commit::commit;
pub use deployment::Deployment;
pub(crate) use own::*;
pub(crate) use pooled::*;
pub(crate) use savepoint::Savepoint;
