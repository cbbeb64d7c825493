//! Lease mode: effects outside the database, at least once or at most once, by choice, and operations of several steps.
//!
//! A payment gateway, an SMS or another service cannot share a transaction with a key. So one transaction claims the
//! key, the work runs, and another transaction stores its result. If the process dies between the two, nobody can tell
//! whether the work took effect. Your [`Policy`] decides what the next caller does:
//!
//! - [`AtLeastOnce`](Policy::AtLeastOnce) takes a lapsed claim over and does the work again. **The effect can happen
//!   twice.** If the other service deduplicates by a key, give it [`Lease::downstream_key`], and it sees one operation
//!   for as long as it remembers the key.
//! - [`AtMostOnce`](Policy::AtMostOnce) does not do the work again before the retention ends. **The effect can stay
//!   unknown**: the key is [indeterminate](crate::Error::Indeterminate) until a [`Reconciler`] or an operator finds
//!   out: [`resolve`](crate::operator::Shown::resolve) or [`release`](crate::operator::Shown::release).
//! - [`InSteps`](Policy::InSteps) is for work of several named parts, in this database and outside. The result of each
//!   part is stored when the part is done, so the next attempt continues after the last one. [`Lease::step`],
//!   [`Lease::step_at_least_once`] and [`Lease::step_at_most_once`] are the kinds of parts. A step at most once that
//!   was begun and has no result makes the key indeterminate, until a [`Reconciler`] or an operator settles the
//!   [step](crate::operator::Shown::step).
//!
//! Under every policy at most one result is stored. A stale owner can neither store nor undo anything, because every
//! write demands the fencing token of the claim. For an effect in this database alone, use
//! [`ensure_idempotent`](crate::ensure_idempotent()): it is cheaper, and exactly once.
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
//! A claim lasts for the length of its lease, by the database's clock. While the work runs, the claim renews itself at
//! a third of the lease, in a Tokio task. The owner has a clock of its own. It starts before the claim is sent, so the
//! owner's deadline comes before the database's. If nine tenths of the lease pass without a renewal, the work is
//! dropped at its next await, and the call ends in [`Error::LeaseLost`](crate::Error::LeaseLost). The owner's clock
//! stops while the machine sleeps, and work that does not await is not dropped. So only the fencing token makes sure
//! that a stale owner stores nothing.
//!
//! Make the lease several times as long as a database outage that the work should survive, and no longer than the next
//! attempt may wait: 40 seconds is usual. If a queue delivers a message again before the lease has lapsed, the call
//! only returns [`Error::InFlight`](crate::Error::InFlight).

mod call;
mod finding;
mod handle;
mod options;
mod owner;
mod reconcile;
mod reconciler;
mod resume;
mod settled;
mod step;
mod steps;
mod unbegun;

pub use call::Acquired;
#[cfg(feature = "http")]
pub(crate) use call::Call;
pub use finding::{Effect, Finding, InDoubt};
pub use handle::Lease;
pub use options::{LeaseOptions, Policy};
pub use owner::LeaseOwner;
pub use reconciler::{Reconciler, Visit};
pub use resume::Resumer;
#[cfg(feature = "http")]
pub(crate) use resume::{INTERVAL, INTERVALS};
pub use step::Step;
pub(crate) use step::encode_result;
