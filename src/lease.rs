//! Lease mode: effects outside the database.
//!
//! A payment gateway, an SMS or another service cannot share a transaction with a key. So one transaction claims the
//! key, the work runs, and another transaction stores its result. If the process dies between the two transactions,
//! nothing shows whether the work took effect. Your [`Policy`] decides what the next caller does:
//!
//! - [`AtLeastOnce`](Policy::AtLeastOnce): it does the work again. **The effect can happen twice.** If the other
//!   service deduplicates by a key, send it [`Lease::downstream_key`].
//! - [`AtMostOnce`](Policy::AtMostOnce): it does nothing. **The effect can stay unknown**: the key is
//!   [indeterminate](crate::Error::Indeterminate) until a [`Reconciler`] or an [operator](crate::operator) settles it,
//!   or its retention ends.
//! - [`InSteps`](Policy::InSteps): it continues after the last stored step. Each part of the work is a
//!   [`step`](Lease::step) in this database, a [`step_at_least_once`](Lease::step_at_least_once) or a
//!   [`step_at_most_once`](Lease::step_at_most_once). The guide's page `steps` has a whole program.
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
//! A claim lasts for the length of its lease, by the database's clock. While the work runs, a Tokio task renews it
//! after each third of the lease. The owner has a clock of its own, which starts before the claim is sent, so its
//! deadline comes first. If nine tenths of the lease pass without a renewal, the work is dropped at its next await, and
//! the call returns [`Error::LeaseLost`](crate::Error::LeaseLost).
//!
//! Work that does not await is not dropped, and the owner's clock stops while the machine sleeps. So only the fencing
//! token guarantees that a stale owner stores nothing.
//!
//! Choose a lease that is several times as long as a database outage that the work should survive, and no longer than
//! the next attempt may wait. 40 seconds is usual. A message that a queue delivers again before the lease has lapsed
//! gets [`Error::InFlight`](crate::Error::InFlight).

mod call;
mod handle;
mod options;
mod owner;
mod reconcile;
mod reconciler;
mod resume;
mod step;
mod steps;
mod unbegun;

pub use call::Acquired;
#[cfg(feature = "http")]
pub(crate) use call::Call;
pub use handle::Lease;
pub use options::{LeaseOptions, Policy};
pub use owner::LeaseOwner;
pub use reconciler::{Effect, Finding, InDoubt, Reconciler, Visit};
pub use resume::Resumer;
#[cfg(feature = "http")]
pub(crate) use resume::{INTERVAL, INTERVALS};
pub use step::Step;
pub(crate) use step::encode_result;
