//! The janitor and its options.

use std::time::Duration;

use sqlx::PgPool;

use crate::limits::within;
use crate::{Deployment, InvalidDuration};

/// A batch of this size takes milliseconds, so a claim of a swept key hardly waits.
const BATCH_SIZE: u32 = 1000;

/// The largest batch. A larger one would hold its row locks and its memory for too long, and hardly save round trips.
pub const MAX_BATCH_SIZE: u32 = 50_000;

/// Without a pause the sweep takes a core from the foreground. With this one it works for a small part of the time.
const PAUSE: Duration = Duration::from_millis(50);

/// A pass each minute is cheap on an idle table, and short on a busy one.
const INTERVAL: Duration = Duration::from_secs(60);

/// Under a second, empty passes would be most of the work. Beyond a day, cron is the better tool.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60);

/// Twice the default wait, so a duplicate that asked before the end of the retention still finds the record after its
/// wait.
const GRACE: Duration = Duration::from_secs(10);

/// Sweeps the table of one database.
///
/// ```no_run
/// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::Error> {
/// let swept = pg_idempotency::Janitor::new(pool).sweep_once(100_000).await?;
/// println!("{} records deleted", swept.rows());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Janitor {
    pub(super) pool: PgPool,
    pub(super) options: Options,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) batch_size: u32,
    pub(super) pause: Duration,
    pub(super) interval: Duration,
    pub(super) grace: Duration,
    pub(super) deployment: Deployment,
}

/// A batch size of zero, or over [`MAX_BATCH_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the batch size is {given}; it must be between 1 and {MAX_BATCH_SIZE}")]
#[non_exhaustive]
pub struct InvalidBatchSize {
    /// The size that was given.
    pub given: u32,
}

impl Janitor {
    /// A janitor that takes its connections from this pool, one at a time. By default it deletes batches of 1000
    /// records with pauses of 50 ms.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        let options = Options {
            batch_size: BATCH_SIZE,
            pause: PAUSE,
            interval: INTERVAL,
            grace: GRACE,
            deployment: Deployment::new(),
        };
        Self { pool, options }
    }

    /// Sets the number of records that one transaction deletes. The default is 1000.
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

    /// Sets the pause after a full batch. The default is 50 ms. With a pause of zero, the janitor sweeps as fast as
    /// possible.
    #[must_use]
    pub fn with_pause(mut self, pause: Duration) -> Self {
        self.options.pause = pause;
        self
    }

    /// Sets the pause of [`run`](Self::run) after a pass. The default is a minute.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under a second or over a day.
    pub fn with_interval(mut self, interval: Duration) -> Result<Self, InvalidDuration> {
        self.options.interval = within("interval", interval, INTERVALS)?;
        Ok(self)
    }

    /// Sets how long an expired record is left alone. The default is 10 seconds. The grace does not prolong the
    /// retention: an expired key is new at once. The grace is for duplicates that asked before the record expired and
    /// still wait: the record is their answer. Make it longer than the longest wait of your service.
    #[must_use]
    pub fn with_grace(mut self, grace: Duration) -> Self {
        self.options.grace = grace;
        self
    }

    /// How the service reaches the database, and whether the table is distributed. Batches of a distributed table are
    /// chosen by time: records that expired in the same microsecond are deleted together, so a batch may be somewhat
    /// larger.
    #[must_use]
    pub fn with_deployment(mut self, deployment: Deployment) -> Self {
        self.options.deployment = deployment;
        self
    }
}
