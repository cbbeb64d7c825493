//! Every SQL statement on `idempotency.record`, one function each.
//!
//! All statements are literals, but those of the option *fewest round trips* and the sweep of a named leaf. They name
//! the schema, and cast each parameter (sqlx caches a prepared statement under its text alone). The operands of an
//! operator have types for which `pg_catalog` has an exact one, because PostgreSQL would prefer an exact one of another
//! schema. Statements on one record contain the whole key. Time is the database's: `statement_timestamp()` decides
//! about expiry, because `now()` is the start of the transaction.
//!
//! - The protocol of all modes: `claim`, `look`, `take_over`, `wait`; `select_first` is an optional shortcut.
//! - The end of a claim: `complete` in transaction mode, `lease` in lease mode, `release` without a response.
//! - The steps of an operation: `step`. Operations that a resumer may take over: `resume`, `envelope`; those that
//!   a reconciler looks up: `doubt`, `looks`.
//! - Which statements a table needs, the usual ones or those for a distributed table: `distributed`.
//! - How a transaction of the crate begins: `opening`.
//! - Marks in batches: `mark`.
//! - The janitor: `sweep`. The operator: `stats`, `show`, `settle`, `setup`, `schema`.
//! - The tables of the service that are written inside operations only: `protect`.

mod claim;
mod complete;
mod distributed;
mod doubt;
mod envelope;
mod fragment;
mod lease;
mod look;
mod looks;
mod mark;
pub(crate) mod opening;
mod protect;
mod release;
mod resume;
mod schema;
mod select_first;
mod settle;
mod setup;
mod show;
mod statement;
mod stats;
mod step;
mod sweep;
mod take_over;
mod wait;

pub(crate) use claim::{Claim, Inserted, Terms, Tried};
pub(crate) use distributed::{
    Distribution, Part, create_distributed_table, distribution, durable_opening, durable_opening_of_all_rows,
    prepare_decision, size, workers,
};
pub(crate) use doubt::{Doubt, Writing};
pub use envelope::ShownRequest;
pub(crate) use look::{Found, Standing};
pub(crate) use looks::LooksAt;
pub use looks::ShownLooks;
pub(crate) use mark::{MarkBatch, MarkOf};
pub(crate) use opening::{is_open, put_back};
pub use protect::OnEscape;
pub(crate) use protect::{gaps, protect, protected, unprotect};
pub(crate) use release::{Unclaimed, storable};
pub(crate) use resume::{Candidate, StoredAs};
pub(crate) use schema::{Distrust, Known, Schema, schema};
pub(crate) use settle::{Decision, Grants};
pub(crate) use setup::{CommitSetting, commit_settings, setup, with_hidden_rows};
pub use show::Shown;
pub(crate) use show::{are_used_up, unsettled};
pub(crate) use statement::{Record, draw_token};
#[cfg(feature = "testing")]
pub(crate) use statement::{changes_a_row, interval};
pub use stats::Group;
pub(crate) use stats::groups;
pub use step::ShownStep;
pub(crate) use step::StoredSteps;
pub(crate) use sweep::{Deleted, oldest_due};
pub(crate) use wait::{Awaited, wait_for_row};
