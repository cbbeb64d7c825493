//! The transactional mode: key, effects and response commit in one transaction of the layer.

mod claim;
mod idempotent_tx;
mod run;

pub use idempotent_tx::{IdempotentTx, NoTransaction};
pub use run::Transactional;
