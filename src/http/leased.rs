//! The leased mode: the key is claimed under a lease, the handler has its effect outside, and the response is stored.

mod idempotent_lease;
mod run;

pub use idempotent_lease::{IdempotentLease, NoLease};
pub use run::Leased;
