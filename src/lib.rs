#![doc = include_str!("front_page.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod background;
mod claim;
mod error;
mod fingerprint;
#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
pub mod http;
mod janitor;
mod key;
pub mod lease;
mod limits;
pub mod mark;
mod migrate;
mod observe;
pub mod operator;
mod outcome;
mod record;
mod route;
mod session;
mod state;
mod transaction;

// The README is not a part of the crate's documentation. The doctests compile the code in the README.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../README.md")]
mod readme {}

// The pages of the guide link to items of every feature.
#[cfg(all(any(doc, doctest), feature = "axum", feature = "testing"))]
pub mod guide;

#[cfg(feature = "testing")]
#[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
pub mod testing;

pub use chrono;
pub use sqlx;

pub use error::{BoxError, Error, Incompatible, InvalidRequest, InvalidStep, Misuse, SettleError, SetupError};
pub use fingerprint::{Body, Fingerprint, InvalidBody};
pub use janitor::{Janitor, Swept};
pub use key::{InvalidKey, Key, KeyPart};
pub use limits::{DEFAULT_RETENTION, OnDuplicate};
pub use migrate::{
    MIGRATOR, OnEscape, any_language_sql, migrate, migrate_any_language, protect, schema_sql, unprotect,
};
pub use outcome::{Outcome, Verdict};
pub use session::commit;
pub use state::Mode;
pub use transaction::{Idempotency, ensure_idempotent};
