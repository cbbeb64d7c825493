//! Every SQL statement on `idempotency.record`, one function each.
//!
//! All statements are literals, but those of the option *fewest round trips* and the sweep of a named leaf. They name
//! the schema, and cast each parameter (sqlx caches a prepared statement under its text alone). The operands of an
//! operator have types for which `pg_catalog` has an exact one, because PostgreSQL would prefer an exact one of another
//! schema. Statements on one record contain the whole key. Time is the database's: `statement_timestamp()` decides
//! about expiry, because `now()` is the start of the transaction.
//!
//! - `claim`: winning the right to perform, one key at a time or a batch of marks. `look`: what is in the way, and
//!   waiting for it.
//! - `distributed`: the choice between the usual statements and those for a distributed table.
//! - `opening`: how a transaction of the crate begins.
//! - The end of a claim: `complete` in transaction mode, `lease` in lease mode, `release` without a response.
//! - `step`: the steps of an operation. `resume`: operations that a resumer may take over. `doubt`, `looks`: those that
//!   a reconciler looks up.
//! - `table`: the sweep, sizes and counts. `show`: records for an operator, `settle`: what the operator decides.
//!   `schema`: whose the schema is, and the tables of the service that are written inside operations only.
//! - `statement`, `fragment`: what statements share.

mod claim;
mod complete;
mod distributed;
mod doubt;
mod fragment;
mod lease;
mod look;
mod looks;
pub(crate) mod opening;
mod release;
mod resume;
mod schema;
mod settle;
mod show;
mod statement;
mod step;
mod table;

pub(crate) use claim::{Claim, Inserted, MarkBatch, MarkOf, Terms, Tried};
pub(crate) use distributed::{
    Distribution, Part, create_distributed_table, distribution, durable_opening, durable_opening_of_all_rows,
    prepare_decision, size, workers,
};
pub(crate) use doubt::{Doubt, Writing};
pub(crate) use look::{Awaited, Found, Standing, wait_for_row};
pub(crate) use looks::LooksAt;
pub use looks::ShownLooks;
pub(crate) use opening::{is_open, put_back};
pub(crate) use release::{Unclaimed, storable};
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
