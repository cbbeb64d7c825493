//! The SQL statements on `idempotency.record`, one function for each.
//!
//! These rules hold for every statement. All are literals, except for those of `RoundTrips::Fewest` and the sweep of a
//! named leaf.
//!
//! - It names the schema, and casts each parameter: sqlx caches a prepared statement under its text alone.
//! - The operands of an operator have types for which `pg_catalog` has an exact operator, because PostgreSQL would
//!   prefer an exact one of another schema.
//! - A statement on one record contains the whole key.
//! - `statement_timestamp()` of the database decides about expiry, because `now()` is the start of the transaction.
//!
//! The files:
//!
//! - `claim`: to win the right to perform, for one key or a batch of marks. `look`: to read the record that is in the
//!   way, and to wait. `tried`: where a statement of the two leads.
//! - `distributed`: the choice between the usual statements and those for a distributed table.
//! - `opening`: how a transaction of the crate begins.
//! - `ends`: how a claim ends, with a response or without one.
//! - `step`: the steps of an operation. `resume`: operations that a resumer may take over. `doubt`, `probes`: operations
//!   that a reconciler settles.
//! - `table`: the sweep, sizes and counts. `show`: records for an operator. `settle`: the operator's decisions.
//!   `schema`: the owner of the schema, and protected tables.
//! - `statement`: shared parts of statements.

mod claim;
mod distributed;
mod doubt;
mod ends;
mod look;
pub(crate) mod opening;
mod probes;
mod resume;
mod schema;
mod settle;
mod show;
mod statement;
mod step;
mod table;
mod tried;

pub(crate) use claim::{MarkBatch, MarkOf};
pub(crate) use distributed::{
    Distribution, Part, create_distributed_table, distribution, durable_opening, durable_opening_of_all_rows,
    prepare_decision, size, workers,
};
pub(crate) use doubt::Doubt;
pub(crate) use ends::Unclaimed;
pub(crate) use look::wait_for_row;
pub(crate) use opening::{is_open, put_back};
pub use probes::{Probed, ShownProbes};
pub use resume::ShownRequest;
pub(crate) use resume::{Candidate, StoredAs};
pub use schema::OnEscape;
pub(crate) use schema::{Distrust, Known, Schema, gaps, protect, protected, schema, unprotect};
pub(crate) use settle::{Decision, Grants};
pub use show::Shown;
pub(crate) use show::{are_used_up, unsettled};
pub(crate) use statement::{Record, draw_token};
#[cfg(feature = "testing")]
pub(crate) use statement::{changes_a_row, interval};
pub use step::ShownStep;
pub(crate) use step::StoredSteps;
pub use table::Group;
pub(crate) use table::{CommitSetting, Deleted, commit_settings, groups, oldest_due, setup, with_hidden_rows};
pub(crate) use tried::{CalledAt, Claim, Found, Terms, Tried};
