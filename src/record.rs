//! The SQL statements on `idempotency.record`, one function for each.
//!
//! Every statement is a literal, except for the sweep of a leaf. These rules hold for every statement:
//!
//! - A statement names the schema. Each parameter is cast, because sqlx caches a prepared statement under its text
//!   alone.
//! - The operands of an operator have types for which `pg_catalog` has an exactly matching operator. Otherwise
//!   PostgreSQL would prefer an exactly matching operator of another schema.
//! - A statement on one record contains the whole key.
//! - The database's `statement_timestamp()` decides about expiry, because `now()` is the start of the transaction.
//!
//! The files:
//!
//! - `claim`: statements that claim a key or a batch of marks. `look`: statements that read a record that is in the way
//!   of a claim, and statements that wait. `tried`: the terms and the results of both kinds of statements.
//! - `opening`: the messages that begin a transaction of the crate.
//! - `ends`: the end of a claim, with or without a response.
//! - `step`: the steps of an operation. `resume`: operations that a resumer may take over. `doubt`, `probes`:
//!   operations that a reconciler settles.
//! - `table`: the sweep, sizes and counts. `show`: records for an operator. `settle`: the operator's decisions.
//!   `schema`: the owner of the schema, and protected tables. `rights`: the rights of the current role. `citus`: where
//!   Citus keeps the table.
//! - `statement`: shared parts of statements.

mod citus;
mod claim;
mod doubt;
mod ends;
mod look;
mod opening;
mod probes;
mod resume;
mod rights;
mod schema;
mod settle;
mod show;
mod statement;
mod step;
mod table;
mod tried;

pub(crate) use citus::{Placement, placement, size};
pub(crate) use claim::{MarkBatch, MarkOf};
pub(crate) use doubt::Doubt;
pub(crate) use ends::ReleaseOfUnbegun;
pub(crate) use look::pause;
#[cfg(feature = "http")]
pub(crate) use opening::IS_EXEMPT;
pub(crate) use opening::{Opening, is_open, prepare_decision, put_back};
pub use probes::{Probed, ShownProbes};
pub use resume::ShownRequest;
pub(crate) use resume::{Candidate, StoredAs};
pub(crate) use rights::missing_rights;
pub use schema::OnEscape;
pub(crate) use schema::{Distrust, Schema, gaps, protect, protected, schema, swallowers, unprotect};
pub(crate) use settle::{Grants, Settlement};
pub use show::Shown;
pub(crate) use show::{are_used_up, limit_time, search, unsettled};
pub(crate) use statement::{Record, draw_token};
#[cfg(feature = "testing")]
pub(crate) use statement::{changes_a_row, interval};
pub use step::ShownStep;
pub(crate) use step::StoredSteps;
pub use table::Group;
pub(crate) use table::{CommitSetting, Deleted, Part, commit_settings, groups, oldest_due, setup, with_hidden_rows};
pub(crate) use tried::{CalledAt, Claim, Found, Terms, Tried};
