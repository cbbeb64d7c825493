//! Every SQL statement on `idempotency.record`, one function each.
//!
//! All statements but those of the option *fewest round trips* are literals. They name the schema, cast each parameter (sqlx
//! caches a prepared statement under its text alone) and contain the whole key. Time is the database's:
//! `statement_timestamp()` decides about expiry, because `now()` is the start of the transaction.
//!
//! - The protocol of all modes: `claim`, `look`, `take_over`, `wait`; `select_first` is an optional shortcut.
//! - The end of a claim: `complete` in transaction mode, `lease` in lease mode, `release` without a response.
//! - Marks in batches: `mark`.
//! - Janitor and operator: `sweep`, `inspect`, `rules`, `setup`, `lock`.

mod claim;
mod complete;
mod condition;
mod inspect;
mod lease;
mod lock;
mod look;
mod mark;
mod release;
mod rules;
mod select_first;
mod setup;
mod statement;
mod sweep;
mod take_over;
mod wait;

pub(crate) use claim::{Claim, Terms, draw_token};
pub(crate) use inspect::{groups, size, unsettled};
pub(crate) use lease::Actor;
pub(crate) use lock::{INSTALLER, SINGLE_RUNNER, holder, try_lock};
pub(crate) use look::{Found, LeaseState, Standing};
pub(crate) use mark::{MarkBatch, Seen};
pub(crate) use rules::{Broken, broken_rules};
pub(crate) use setup::{commit_settings, response_compression, setup, without_autovacuum};
pub(crate) use statement::{Record, Response};
pub(crate) use sweep::{Batch, Due, count_due, leaves, oldest_due, sweep, sweep_distributed};
pub(crate) use take_over::TakeOver;
pub(crate) use wait::{Awaited, wait_for_row};
