//! The janitor deletes records that are past their retention, a batch at a time.
//!
//! Correctness never depends on it: every claim ignores an expired record, whether or not a sweep has deleted it. The
//! janitor frees the space. Run it from cron (`idempotency-janitor sweep`), or let each process of a service
//! [`run`](Janitor::run) one: they share the work, because each skips the rows that another has locked.
//!
//! # Does it keep up?
//!
//! A busy janitor deletes `batch size / (time of a batch + pause)` rows a second. Make it at least twice the number of
//! inserts a second; the guide's page `production` has examples. The interval decides only how many
//! rows wait for the next pass. If the oldest expired record gets older from pass to pass, the janitor logs a warning.

mod options;
mod run;
mod sweep;
mod swept;

pub use options::{InvalidBatchSize, Janitor, MAX_BATCH_SIZE};
pub use swept::{DueRecords, Swept};
