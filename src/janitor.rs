//! The janitor deletes records that are past their retention, a batch at a time.
//!
//! Correctness never depends on it: every claim ignores an expired record, whether or not a sweep has deleted it. The
//! janitor frees the space. Run it from cron (`idempotency-janitor sweep`), or let each process of a service
//! [`run`](Janitor::run) one: they share the work, because each skips the rows that another has locked.
//!
//! # Does it keep up?
//!
//! A busy janitor deletes `batch size / (time of a batch + pause)` rows a second, which is [`Janitor::capacity`]. With
//! the defaults and 10 ms for a batch of 1000 that is 16 000. For 20 000 inserts a second, use batches of 10 000, which
//! take some 100 ms: 66 000. The interval decides only how many rows wait for the next pass. With 20 000 inserts a
//! second and an interval of 60 s, 1.2 million rows wait, which is some 18 s of work. If the oldest expired record gets
//! older from pass to pass, the janitor logs a warning.

mod options;
mod run;
mod sweep;
mod swept;

pub use options::{InvalidBatchSize, Janitor, MAX_BATCH_SIZE};
pub use swept::{DueRecords, Swept};
