//! The functions of an operator: they count the records, check the set-up, show records, and settle them.
//!
//! The binary `idempotency-janitor` is a command line over these functions, and a service may call them itself. With a
//! pool, each function runs in a transaction of its own, and [`bounded`] limits its time. The guide's page `settle`
//! explains when a key has to be settled, and has a program.
//!
//! [`show`] and [`unsettled`] return records. The verbs of [`Shown`] settle a record exactly as it was shown: if the
//! record has changed since, a verb returns [`SettleError::Changed`] and does nothing. Each verb consumes the record
//! and returns its new version. [`Error::Indeterminate`] and [`Error::Exhausted`] have the [`Version`] of their record:
//! compare it with [`Shown::version`] before you settle the operation of such an error.
//!
//! # In a transaction of yours
//!
//! A verb also takes a connection in a transaction, so that the decision commits together with a row of yours, such as
//! the line of an audit:
//!
//! - **Decide last, and commit at once.** The record's row stays locked until the transaction ends, and calls with the
//!   key may wait for it.
//! - A verb sets `synchronous_commit` to `on` for the rest of the transaction if it is weaker, because a decision
//!   that the server loses could become a second effect. It leaves every other setting unchanged.
//! - After an error of a verb, nothing has changed, and the transaction is usable.
//! - If the future of a verb is dropped, roll back: the decision may have been sent. So put a time-out around the whole
//!   transaction, which then ends with the future, and not around the verb alone. The same holds for [`bounded`].
//! - If you roll back, the version of the record that the method returned was never stored. Every settling method of
//!   this version returns [`SettleError::Changed`].
//! - A table that [`protect`](crate::protect()) protects refuses the line of an audit, like every write outside an
//!   operation. Send `set local idempotency.claim = 'exempt'` first.
//!
//! [`Error::Exhausted`]: crate::Error::Exhausted
//! [`Error::Indeterminate`]: crate::Error::Indeterminate
//! [`SettleError::Changed`]: crate::SettleError::Changed

mod health;
mod records;
mod settle;

pub use crate::record::{Group, Probed, Shown, ShownProbes, ShownRequest, ShownStep};
pub use crate::session::bounded;
pub use crate::state::{State, Version};
pub use health::{Warning, health, protected};
pub use records::{Stats, show, stats, unsettled};
pub use settle::{PoolOrTransaction, StepInDoubt};
