//! `Idempotency-Key` over HTTP, after draft-ietf-httpapi-idempotency-key-header-07: a tower layer.

mod body;
mod conclusion;
#[cfg(feature = "axum")]
mod extract;
mod header;
mod layer;
mod lease;
mod problem;
mod rejection;
mod replay;
mod request;
mod runs;
mod seal;
mod service;
mod transaction;

pub use body::Body;
pub use conclusion::{NoStore, NotPerformed};
pub use header::{IDEMPOTENCY_KEY, MalformedKey, key_value};
pub use layer::{IdempotencyLayer, InvalidSetting};
pub use lease::{IdempotentLease, NoLease};
pub use problem::{PROBLEM_TYPE, problem, processing};
pub use rejection::{Misconfigured, Rejection};
pub use replay::IDEMPOTENCY_REPLAYED;
pub use runs::Runs;
pub use seal::Seal;
pub use service::IdempotencyService;
pub use transaction::{IdempotentTx, NoTransaction};
