//! Lease mode: effects outside the database, at least once or at most once, by choice.
//!
//! A payment gateway, an SMS, another service cannot share a transaction with their key. So the key is claimed in one
//! transaction, the work is done, and its result is stored in another; between the two, the process may die. Nothing in the
//! world can then tell whether the work took effect, and the crate does not pretend to. You choose, with a [`Policy`], what
//! the next caller does:
//!
//! - [`AtLeastOnce`](Policy::AtLeastOnce) takes a lapsed claim over and does the work again. **The outside effect can happen
//!   twice.** Give the other side [`Lease::downstream_key`], if it dedupes by one, and it sees one operation.
//! - [`AtMostOnce`](Policy::AtMostOnce) never does it again. **The effect can be left unknown**: the key is
//!   [indeterminate](Error::Indeterminate) until somebody finds out and says [`resolve`] or [`release`].
//!
//! Either way at most one result is stored, and a stale owner can neither store nor undo anything: every write demands the
//! fencing token of the claim. Where the effect is in this database, take [`ensure_idempotent`](crate::ensure_idempotent())
//! instead: it is cheaper, and exactly once.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use pg_idempotency::{Error, Key};
//! use pg_idempotency::lease::{Policy, ensure_leased};
//! # struct Gateway;
//! # impl Gateway { async fn charge(&self, _: &str, _: i64) -> std::io::Result<String> { Ok(String::new()) } }
//!
//! # async fn f(pool: sqlx::PgPool, gateway: Gateway, order: &str, cents: i64) -> anyhow::Result<()> {
//! let key = Key::new("shop", "charge", order)?;
//! let policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
//! let receipt = ensure_leased(&pool, &key, &cents, policy, async |lease| -> anyhow::Result<String> {
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
//! A claim lasts for the length of its lease, by the database's clock, and renews itself at a third of it while the work
//! runs. The owner has a clock of its own too: counted from before the claim was sent, so that it ends first. Past nine
//! tenths without a renewal the work is dropped at its next await and the call ends in [`Error::LeaseLost`]. That clock
//! stands still while the machine sleeps, and work that does not await is not dropped: the fence alone is certain. Make the
//! lease several times as long as a database outage that you mean to sit out, and as short as you can bear to wait for the
//! next attempt: 40 seconds is usual. A queue that delivers again before the lease has lapsed only buys
//! [`Error::InFlight`]. The renewal is a Tokio task, so lease mode needs Tokio.

mod guard;
mod leasing;
mod owner;
mod policy;
mod renewal;
mod settle;

pub use guard::Lease;
#[cfg(feature = "http")]
pub(crate) use leasing::unless_lost;
pub use leasing::{Acquired, Leasing, ensure_leased};
#[cfg(feature = "http")]
pub(crate) use owner::Owner;
pub use owner::downstream_key;
pub use policy::Policy;
pub use settle::{release, resolve};
