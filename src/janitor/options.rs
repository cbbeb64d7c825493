//! How fast, how often, and who.

use std::num::NonZeroU32;
use std::time::Duration;

use super::Janitor;
use crate::limits::within;
use crate::{Deployment, InvalidDuration};

/// Small enough that a batch takes milliseconds and a claim of a swept key hardly waits.
const BATCH_SIZE: u32 = 1000;

/// Past this a batch holds its row locks and its memory for longer than it saves round trips.
pub const MAX_BATCH_SIZE: u32 = 50_000;

/// With 1000 rows a batch this costs the foreground 6 to 9 % of its throughput; without a pause it is 27 to 45 %.
const PAUSE: Duration = Duration::from_millis(50);

/// Seldom enough to be cheap on an idle table, often enough that a pass stays short.
const INTERVAL: Duration = Duration::from_secs(60);

/// Under a second the empty passes cost more than they find; past a day it is cron's job.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60);

/// Twice the default wait: a duplicate that asked before the end of the retention still finds the record when its wait is over.
const GRACE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) batch_size: u32,
    pub(super) pause: Duration,
    pub(super) interval: Duration,
    pub(super) max_rows_per_second: Option<NonZeroU32>,
    pub(super) single_runner: bool,
    pub(super) grace: Duration,
    pub(super) deployment: Deployment,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            batch_size: BATCH_SIZE,
            pause: PAUSE,
            interval: INTERVAL,
            max_rows_per_second: None,
            single_runner: false,
            grace: GRACE,
            deployment: Deployment::new(),
        }
    }
}

impl Options {
    /// The pause after a full batch that took this long: the configured one, or what the rate still asks for.
    pub(super) fn pause_after(&self, rows: u32, took: Duration) -> Duration {
        let owed = self.max_rows_per_second.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(f64::from(rows) / f64::from(rate.get())).saturating_sub(took)
        });
        self.pause.max(owed)
    }
}

/// A batch size that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a batch size of {given} was asked for; it must be between 1 and {MAX_BATCH_SIZE}")]
#[non_exhaustive]
pub struct InvalidBatchSize {
    /// What was given.
    pub given: u32,
}

impl Janitor {
    /// How many records one transaction deletes. The default is 1000.
    ///
    /// # Errors
    ///
    /// [`InvalidBatchSize`] for zero or over [`MAX_BATCH_SIZE`].
    pub fn with_batch_size(mut self, batch_size: u32) -> Result<Self, InvalidBatchSize> {
        if !(1..=MAX_BATCH_SIZE).contains(&batch_size) {
            return Err(InvalidBatchSize { given: batch_size });
        }
        self.options.batch_size = batch_size;
        Ok(self)
    }

    /// How long to rest after a full batch. The default is 50 ms; zero sweeps as fast as it can.
    #[must_use]
    pub fn with_pause(mut self, pause: Duration) -> Self {
        self.options.pause = pause;
        self
    }

    /// How long [`run`](Self::run) rests after a pass. The default is a minute.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under a second or over a day.
    pub fn with_interval(mut self, interval: Duration) -> Result<Self, InvalidDuration> {
        self.options.interval = within("interval", interval, INTERVALS)?;
        Ok(self)
    }

    /// A rate that is not exceeded, on top of the pause.
    #[must_use]
    pub fn with_max_rows_per_second(mut self, rate: NonZeroU32) -> Self {
        self.options.max_rows_per_second = Some(rate);
        self
    }

    /// Whether only one janitor of a database may delete at a time. Off by default: several share the work. It is a
    /// transaction-level advisory lock, so it passes a pooler, and it ends with a runner that dies.
    #[must_use]
    pub fn with_single_runner(mut self, single_runner: bool) -> Self {
        self.options.single_runner = single_runner;
        self
    }

    /// How long an expired record is left alone. The default is 10 seconds. An expired key is new at once, whatever this is; the
    /// grace is for duplicates that asked before and still wait: for them the record is the answer. Make it longer than the
    /// longest wait of your service.
    #[must_use]
    pub fn with_grace(mut self, grace: Duration) -> Self {
        self.options.grace = grace;
        self
    }

    /// How the service reaches the database, and whether the table is distributed. Batches of a distributed table are chosen by
    /// time: records that expired in the same microsecond are deleted together, so a batch may be somewhat larger.
    #[must_use]
    pub fn with_deployment(mut self, deployment: Deployment) -> Self {
        self.options.deployment = deployment;
        self
    }

    /// The rows that this janitor deletes in a second while it is busy, where a batch takes `batch_time`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::janitor::InvalidBatchSize> {
    /// // 20 000 inserts a second, 100 000 rows deleted in a second of work:
    /// let janitor = pg_idempotency::Janitor::new(pool).with_batch_size(10_000)?;
    /// assert!(janitor.capacity(Duration::from_millis(100)) > 3.0 * 20_000.0);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn capacity(&self, batch_time: Duration) -> f64 {
        let rows = self.options.batch_size;
        f64::from(rows) / (batch_time + self.options.pause_after(rows, batch_time)).as_secs_f64()
    }
}
