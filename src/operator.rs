//! What an operator asks and decides: how much is in the table, whether the set-up keeps the crate's promises, what
//! became of one key, which records wait for a decision, and the decision.
//!
//! The binary `idempotency-janitor` is a command line over these functions, and a service may call them itself. With a
//! pool, each runs in a transaction of its own, and [`bounded`] bounds its time.
//!
//! # Settling
//!
//! [`show`] and [`unsettled`] return records, and the verbs of [`Shown`] settle exactly what was shown. Each verb uses
//! the record up, and returns it as it is then, because each decision draws a new token.
//!
//! A service that settles the operation of an error, for example with a look-up at the other service, has the
//! [`Version`] of the moment of that error:
//!
//! ```no_run
//! # use std::time::Duration;
//! # use pg_idempotency::{Error, Key, operator};
//! # struct Gateway;
//! # impl Gateway { async fn find(&self, _: &str) -> anyhow::Result<Option<String>> { Ok(None) } }
//! # async fn f(pool: &sqlx::PgPool, gateway: Gateway, key: Key, error: Error) -> anyhow::Result<()> {
//! let Error::Indeterminate { version, .. } = error else { return Err(error.into()) };
//! let Some(shown) = operator::show(pool, &key).await? else { return Ok(()) };
//! // Otherwise its owner has come back, or another operator was faster.
//! if *shown.version() == *version
//!     && let Some(receipt) = gateway.find(shown.downstream_key.as_deref().unwrap_or_default()).await?
//! {
//!     shown.resolve(pool, &receipt, Duration::from_secs(24 * 3600)).await?;
//! }
//! # Ok(()) }
//! ```
//!
//! # In a transaction of yours
//!
//! A verb also takes a connection in a transaction, so that the decision and a row of yours are committed together, or
//! neither:
//!
//! ```no_run
//! # use pg_idempotency::operator::Shown;
//! # async fn f(pool: &sqlx::PgPool, shown: Shown) -> anyhow::Result<()> {
//! let mut tx = pool.begin().await?;
//! let line = "ticket 4712: the gateway has no such text";
//! sqlx::query("insert into audit (line) values ($1::text)").bind(line).execute(&mut *tx).await?;
//! shown.release(&mut tx, line).await?;
//! pg_idempotency::commit(tx).await?;
//! # Ok(()) }
//! ```
//!
//! - **Decide last, and commit at once.** The record's row stays locked until the transaction ends, and calls with the
//!   key may wait for it.
//! - The verb sets `synchronous_commit` to `on` for the rest of the transaction if it is weaker, because a decision
//!   that the server loses could become a second effect. It leaves every other setting as it was.
//! - If it returns an error, it has changed nothing, and the transaction is usable.
//! - If its future is dropped, roll back: the decision may have been sent. So put a time-out around the whole
//!   transaction, which then ends with the future, and not around the verb alone. The same holds for [`bounded`].
//! - If you roll back, the record that it returned was never there: its verbs return [`SettleError::Changed`].
//! - A table that [`protect`](crate::protect()) protects refuses the row of an audit, like every write outside an
//!   operation, until the transaction says `set local idempotency.claim = 'exempt'`.
//!
//! [`SettleError::Changed`]: crate::SettleError::Changed

mod health;
mod records;
mod settle;
mod stats;

pub use crate::record::{Group, Shown, ShownLooks, ShownRequest, ShownStep};
pub use crate::session::bounded;
pub use crate::state::{State, Version};
pub use health::{Warning, health, protected};
pub use records::{show, unsettled};
pub use settle::{PoolOrTransaction, StepInDoubt};
pub use stats::{Stats, stats};
