#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod answer;
mod call;
mod claim;
mod commit;
mod connections;
pub mod dedup;
mod deployment;
mod ensure;
mod error;
mod fewest;
mod fingerprint;
#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
pub mod http;
pub mod janitor;
mod key;
pub mod lease;
mod migrate;
mod mode;
mod observe;
pub mod operator;
mod options;
mod outcome;
mod poll;
mod record;
mod savepoint;
mod transaction;

// Compiled with the doctests, like the README.
#[cfg(all(doctest, feature = "testing"))]
#[doc = include_str!("../docs/testing.md")]
mod tutorial {}

#[cfg(feature = "testing")]
#[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
pub mod testing;

pub use chrono;
pub use sqlx;

pub use commit::commit;
pub use deployment::Deployment;
pub use ensure::{ensure_idempotent, ensure_isolated};
pub use error::{BoxError, Error, LockHolder};
pub use fingerprint::{Body, Fingerprint, InvalidBody};
pub use janitor::{Janitor, Swept};
pub use key::{InvalidKey, Key, KeyPart, MAX_PART_BYTES};
pub use migrate::{MIGRATOR, migrate, schema_sql};
pub use mode::Mode;
pub use options::{DEFAULT_RETENTION, Idempotency, InFlight, InvalidDuration};
pub use outcome::{Outcome, Verdict};
