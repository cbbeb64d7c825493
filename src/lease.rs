//! Lease mode: effects outside the database.
//!
//! A payment gateway, an SMS provider or another service cannot take part in the transaction that stores a key. So one
//! transaction claims the key, then the work runs, and a second transaction stores the result of the work. If the
//! process dies between the two transactions, nothing shows whether the work took effect. Your [`Policy`] decides what
//! the next caller does:
//!
//! - [`AtLeastOnce`](Policy::AtLeastOnce): the next caller does the work again. **The effect can happen twice.** If the
//!   other service deduplicates by a key, send [`Lease::downstream_key`] to that service.
//! - [`AtMostOnce`](Policy::AtMostOnce): the next caller does nothing. **Whether the effect happened can stay
//!   unknown.** The key is [indeterminate](crate::Error::Indeterminate) until a [`Reconciler`] or an
//!   [operator](crate::operator) settles the key, or until its retention ends.
//! - [`InSteps`](Policy::InSteps): the next caller continues after the last stored step. Each part of the work is a
//!   [`step`](Lease::step) in this database, a [`step_at_least_once`](Lease::step_at_least_once) or a
//!   [`step_at_most_once`](Lease::step_at_most_once). The guide's page `steps` contains a complete program.
//!
//! Under every policy at most one result is stored. A stale owner can neither store nor undo anything, because every
//! write requires the fencing token of the claim. For an effect in this database alone, use
//! [`ensure_idempotent`](crate::ensure_idempotent()), which is cheaper and performs the effect exactly once.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use pg_idempotency::{Error, Key};
//! use pg_idempotency::lease::{LeaseOptions, Policy};
//! # struct Gateway;
//! # impl Gateway { async fn charge(&self, _: &str, _: i64) -> std::io::Result<String> { Ok(String::new()) } }
//!
//! # async fn f(pool: sqlx::PgPool, gateway: Gateway, order: &str, cents: i64) -> anyhow::Result<()> {
//! let key = Key::new("shop", "charge", order)?;
//! let policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
//! let receipt = LeaseOptions::new(policy).run(&pool, &key, &cents, async |lease| -> anyhow::Result<String> {
//!     Ok(gateway.charge(&lease.downstream_key(), cents).await?)
//! })
//! .await?
//! .into_inner();
//! # let _ = receipt; Ok(())
//! # }
//! ```
//!
//! # The lease
//!
//! A claim lasts for the length of its lease, by the database's clock. While the work runs, a Tokio task renews the
//! lease after each third of its length. The owner also measures the lease by its own clock. This clock starts before
//! the claim is sent, so the owner's deadline comes before the end of the lease in the database. If nine tenths of the
//! lease pass without a renewal, the work is dropped at its next await, and the call returns
//! [`Error::LeaseLost`](crate::Error::LeaseLost).
//!
//! Work that does not await is not dropped. The owner's clock stops while the machine sleeps. So only the fencing token
//! guarantees that a stale owner stores nothing.
//!
//! Choose a lease that is several times as long as the database outages that the work should survive. After a crash,
//! no attempt begins for up to one lease, so the lease must not be longer than the longest delay that you accept. A
//! usual lease is 40 seconds. If a queue delivers a message again before the lease has lapsed, the call returns
//! [`Error::InFlight`](crate::Error::InFlight).

mod call;
mod handle;
mod memory;
mod options;
mod owner;
mod reconcile;
mod reconciler;
mod resume;
mod steps;
mod unbegun;

pub use call::Acquired;
#[cfg(feature = "http")]
pub(crate) use call::LeaseCall;
pub use handle::Lease;
pub(crate) use memory::encode_result;
pub use options::{LeaseOptions, Policy};
pub use owner::LeaseOwner;
pub use reconciler::{Effect, Finding, InDoubt, Reconciler, Visit};
pub use resume::Resumer;
#[cfg(feature = "http")]
pub(crate) use resume::{INTERVAL, Search, assert_interval};
pub use steps::Step;
