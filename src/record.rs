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
//! - The forms for a table that Citus distributes: `distributed`. Its metadata: `citus`.
//! - Marks in batches: `mark`.
//! - The janitor: `sweep`, `due`, `lock`. The operator: `stats`, `unsettled`, `show`, `rules`, `setup`, `owners`.
//! - The tests of a service: `staged`, `time`.

mod citus;
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
mod release;
mod resume;
mod rules;
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
#[cfg(feature = "testing")]
mod time;
mod unsettled;
mod wait;

pub(crate) use citus::{Distribution, create_distributed_table, distribution, warn_if_plain, workers};
pub(crate) use claim::{Claim, Terms};
pub(crate) use due::{count_due, oldest_due};
pub(crate) use lease::Actor;
pub(crate) use lock::{INSTALLER, SINGLE_RUNNER, holder, try_lock};
pub(crate) use look::{Found, Standing};
pub(crate) use mark::{MarkBatch, MarkOf};
pub(crate) use owners::{Stranger, strangers};
pub(crate) use resume::Candidate;
pub(crate) use rules::{Broken, broken_rules};
pub(crate) use setup::{commit_settings, response_compression, setup, without_autovacuum};
pub use show::{Shown, StoredResponse};
#[cfg(feature = "testing")]
pub(crate) use staged::{LeaseState, Staged};
pub(crate) use statement::{Record, Response, draw_token};
pub use stats::Group;
pub(crate) use stats::{groups, size};
pub use step::ShownStep;
pub(crate) use step::{StoredStep, StoredSteps, is_open};
pub(crate) use sweep::{Batch, leaves, sweep, sweep_distributed};
pub(crate) use take_over::TakeOver;
pub use unsettled::{Unsettled, UnsettledPart};
pub(crate) use unsettled::{end_of_part, unsettled};
pub(crate) use wait::{Awaited, wait_for_row};
