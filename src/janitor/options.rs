//! The janitor and its options.

use std::num::NonZeroU32;
use std::time::Duration;

use sqlx::PgPool;

use crate::limits::{RETENTION, is_in};

/// A batch of this size takes milliseconds, so a claim of a swept key hardly waits.
const BATCH_SIZE: NonZeroU32 = NonZeroU32::new(1000).unwrap();

/// Without a pause the sweep takes a core from the foreground. With this one it works for a small part of the time.
const PAUSE: Duration = Duration::from_millis(50);

/// A pass each minute is cheap on an idle table, and short on a busy one.
const INTERVAL: Duration = Duration::from_secs(60);

/// Under a second, empty passes would be most of the work. Beyond a day, cron is the better tool.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60);

/// Longer than a duplicate waits by default: sqlx waits 30 seconds for a connection, and then the call waits for the
/// first call. A duplicate that was made before the end of the retention still finds the record.
const GRACE: Duration = Duration::from_secs(60);

/// Deletes the records of one database that are past their retention, a batch at a time.
///
/// A claim ignores an expired record, so the janitor only frees space. It changes the answer of two calls: one that
/// waits for longer than the [grace](Self::grace), and one under [`OnDuplicate::Reject`](crate::OnDuplicate::Reject)
/// that meets the sweep at an expired record.
///
/// Run the janitor from cron (`idempotency-janitor sweep`), or let each process of a service [`run`](Janitor::run) one.
/// Several janitors share the work, because each skips the rows that another one has locked.
///
/// A busy janitor deletes `batch size / (time of a batch + pause)` rows a second. Make this at least twice the number
/// of inserts a second: see the guide's page `sizing`. [`operator::health`](crate::operator::health()) and a metric
/// show whether it keeps up.
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
    pub(super) batch_size: NonZeroU32,
    pub(super) pause: Duration,
    pub(super) interval: Duration,
    pub(super) grace: Duration,
}

impl Janitor {
    /// A janitor that takes its connections from this pool, one at a time. By default it deletes batches of 1000
    /// records with pauses of 50 ms.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { pool, batch_size: BATCH_SIZE, pause: PAUSE, interval: INTERVAL, grace: GRACE }
    }

    /// Sets the number of records that one transaction deletes. The default is 1000. A batch holds its row locks and
    /// its memory until it ends. A batch of more than some tens of thousands of records hardly saves round trips.
    ///
    /// On a distributed table a batch may be somewhat larger, because it includes all records that expired in the same
    /// microsecond.
    #[must_use]
    pub fn batch_size(mut self, batch_size: NonZeroU32) -> Self {
        self.batch_size = batch_size;
        self
    }

    /// Sets the pause after a full batch. The default is 50 ms. With a pause of zero, the janitor sweeps as fast as
    /// possible.
    ///
    /// # Panics
    ///
    /// Over a day.
    #[must_use]
    #[track_caller]
    pub fn pause(mut self, pause: Duration) -> Self {
        assert!(pause <= *INTERVALS.end(), "a pause must be at most a day");
        self.pause = pause;
        self
    }

    /// Sets the longest time from the start of one pass of [`run`](Self::run) to the start of the next. The default is
    /// a minute. Each time is a random one between half of the interval and the whole interval. The interval decides
    /// only how many expired rows wait.
    ///
    /// # Panics
    ///
    /// Under a second or over a day.
    #[must_use]
    #[track_caller]
    pub fn interval(mut self, interval: Duration) -> Self {
        assert!(is_in(&INTERVALS, interval), "the interval of a janitor must be between a second and a day");
        self.interval = interval;
        self
    }

    /// Sets how long an expired record is kept. The default is a minute. The grace does not prolong the retention: an
    /// expired key is new at once. The record is kept for a duplicate that was made before the record expired and still
    /// waits for its answer.
    ///
    /// Make the grace longer than the longest wait of your service, and than its longest upload: the layer judges a
    /// record as of the arrival of the request, and reads the body before it looks. If the record is deleted during the
    /// upload, the operation is performed again.
    ///
    /// # Panics
    ///
    /// Over ten years, which is the longest retention.
    #[must_use]
    #[track_caller]
    pub fn grace(mut self, grace: Duration) -> Self {
        assert!(grace <= *RETENTION.end(), "a grace must be at most ten years");
        self.grace = grace;
        self
    }
}
