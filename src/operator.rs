//! The functions for operators, which count, show and settle records, and check the set-up.
//!
//! The binary `idempotency-janitor` is a command line over these functions, and a service may also call these
//! functions. With a pool, each function runs in a transaction of its own, and [`bounded`] limits its time. The guide's
//! page `settle` explains when a key has to be settled.
//!
//! [`show`], [`search`] and [`unsettled`] return records. The verbs of [`Shown`] settle a record only in the version
//! that was shown. If the record has changed in the meantime, a verb returns [`SettleError::Changed`] and does nothing.
//! Each verb consumes the `Shown`. All verbs except [`forget`](Shown::forget) return the new version of the record.
//! [`Error::Indeterminate`] and [`Error::Exhausted`] contain the [`Version`] of their record. Compare this version with
//! [`Shown::version`] before you settle the operation of such an error.
//!
//! # In a transaction of yours
//!
//! A verb also accepts a connection that is in a transaction. The decision then commits together with a row of yours,
//! such as an entry of an audit log. These rules apply:
//!
//! - **Decide last, and commit at once.** The record's row stays locked until the transaction ends, and calls with the
//!   key may wait for this row.
//! - If `synchronous_commit` is `off` or `local`, a verb sets the value `on` for the rest of the transaction, because
//!   the loss of a decision could lead to a second effect. A verb leaves every other setting unchanged.
//! - After an error of a verb, nothing has changed, and the transaction is usable.
//! - If the future of a verb is dropped, roll back, because the decision may have been sent. Put a time-out around the
//!   whole transaction, and not around the verb alone. The transaction then ends together with the future. The same
//!   rule applies to [`bounded`].
//! - If you roll back, the version of the record that the verb returned was never stored. Every verb on the returned
//!   version fails with [`SettleError::Changed`].
//! - A table that [`protect`](crate::protect()) protects refuses an entry of an audit log, like every write outside an
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
pub use records::{Stats, search, show, stats, unsettled};
pub use settle::{PoolOrTransaction, StepInDoubt};
