//! Every SQL statement on `idempotency.record`, one function each.
//!
//! All statements are literals, but those of the option *fewest round trips* and the sweep of a named leaf. They name
//! the schema, and cast each parameter (sqlx caches a prepared statement under its text alone). Statements on one record
//! contain the whole key. Time is the database's: `statement_timestamp()` decides about expiry, because `now()` is the
//! start of the transaction.
//!
//! - The protocol of all modes: `claim`, `look`, `take_over`, `wait`; `select_first` is an optional shortcut.
//! - The end of a claim: `complete` in transaction mode, `lease` in lease mode, `release` without a response.
//! - The steps of an operation: `step`. Operations that a resumer may take over: `resume`.
//! - Everything for a table that Citus distributes: `distributed`.
//! - Marks in batches: `mark`.
//! - The janitor: `sweep`, `due`, `lock`. The operator: `stats`, `unsettled`, `show`, `rules`, `setup`, `owners`.
//! - The tables of the service that are written inside operations only: `protect`.
//! - The tests of a service: `staged`, `time`.

mod claim;
mod complete;
mod distributed;
mod due;
mod fragment;
mod lease;
mod lock;
mod look;
mod mark;
mod owners;
mod protect;
mod release;
mod resume;
mod select_first;
mod setup;
mod show;
#[cfg(feature = "testing")]
mod staged;
mod statement;
mod stats;
mod step;
mod sweep;
mod take_over;
mod unsettled;
mod wait;

pub(crate) use claim::{Claim, Terms};
pub(crate) use distributed::{
    Distribution, create_distributed_table, distribution, sweep as sweep_distributed, workers,
};
pub(crate) use due::{count_due, oldest_due};
pub(crate) use lease::Actor;
pub(crate) use lock::{INSTALLER, holder, try_lock};
pub(crate) use look::{Found, Standing};
pub(crate) use mark::{MarkBatch, MarkOf};
pub(crate) use owners::{Stranger, strangers};
pub use protect::OnEscape;
pub(crate) use protect::{Gap, gaps, protect, protected, unprotect};
pub(crate) use resume::Candidate;
pub(crate) use setup::{commit_settings, setup, without_autovacuum};
pub use show::{Shown, StoredResponse};
#[cfg(feature = "testing")]
pub(crate) use staged::{LeaseState, Staged};
pub(crate) use statement::{Record, draw_token};
#[cfg(feature = "testing")]
pub(crate) use statement::{changes_a_row, interval};
pub use stats::Group;
pub(crate) use stats::{groups, size};
pub use step::ShownStep;
pub(crate) use step::{StoredStep, StoredSteps, is_open};
pub(crate) use sweep::{Batch, leaves, sweep};
pub(crate) use take_over::TakeOver;
pub use unsettled::{Unsettled, UnsettledPart};
pub(crate) use unsettled::{end_of_part, unsettled};
pub(crate) use wait::{Awaited, wait_for_row};
