//! [`Janitor`] deletes expired records. This file contains the options of the janitor, the counts of a sweep, the loop
//! around sweeps, and the sweep.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::time::{Duration, Instant};

use sqlx::{PgConnection, PgPool};
use tracing::Instrument as _;

use crate::background::{Next, Passes, Shutdown, begin_anywhere, unless};
use crate::error::sqlstate;
use crate::limits::{RETENTION, is_in};
use crate::operator::{State, stats};
use crate::record::{self, Deleted, Opening, Part};
use crate::session::{ended_or_closed, in_pooled_transaction};
use crate::{Error, migrate, observe};

/// A batch of this size takes milliseconds, so a claim of a swept key hardly waits.
const BATCH_SIZE: NonZeroU32 = NonZeroU32::new(1000).unwrap();

/// Without a pause, the sweep would take a CPU core from other sessions. With this pause, the sweep works for a small
/// part of the time.
const PAUSE: Duration = Duration::from_millis(50);

/// A pass each minute is cheap on an idle table, and short on a busy table.
const INTERVAL: Duration = Duration::from_secs(60);

/// With an interval under a second, empty passes would be most of the work. For an interval over a day, cron is the
/// better tool.
const INTERVALS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60);

/// The grace is longer than the time for which a duplicate waits by default. First, sqlx waits up to 30 seconds for a
/// connection. Then the duplicate waits for the first call. So a duplicate that was made before the end of the
/// retention still finds the record.
const GRACE: Duration = Duration::from_secs(60);

/// The limits of the time for which a transaction of the sweep waits for the server. The transaction waits as long as
/// the interval of the janitor, but at least for the lower limit, and at most for the upper limit. A batch takes
/// milliseconds. After the wait, the server or the network counts as lost.
const BATCH_TIME: RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(60);

/// The time for which a shutdown waits for the batch in progress. Service managers wait at least 30 seconds before they
/// kill a process.
const LAST_BATCH: Duration = Duration::from_secs(5);

/// The smallest batch after time-outs. If a batch of this size fails, the reason is not its size.
const SMALLEST_BATCH: u32 = 10;

/// The maximum time to count the records. A sample of 30,000 records takes a moment.
const COUNT_TIME: Duration = Duration::from_secs(60);

/// Deletes the expired records of one database in batches.
///
/// A claim ignores an expired record, so the janitor only frees space. The janitor can change the answer of two kinds
/// of calls:
///
/// - a call that waits for longer than the [grace](Self::grace);
/// - a call under [`OnDuplicate::Reject`](crate::OnDuplicate::Reject) that finds an expired record while a sweep is
///   deleting it.
///
/// Run the janitor from cron (`idempotency-janitor sweep`), or let each process of a service [`run`](Janitor::run) one.
/// Several janitors share the work, because each janitor skips the rows that another janitor has locked.
///
/// A busy janitor deletes `batch size / (time of a batch + pause)` rows a second. The rate of deletions must be at
/// least twice the rate of inserts. The guide's page `sizing` explains this rule.
/// [`operator::health`](crate::operator::health()) and a metric show whether the janitor keeps up.
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
    pool: PgPool,
    batch_size: NonZeroU32,
    pause: Duration,
    interval: Duration,
    grace: Duration,
}

impl Janitor {
    /// Makes a janitor that takes its connections from this pool, one at a time. By default, the janitor deletes
    /// batches of 1000 records with pauses of 50 ms.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { pool, batch_size: BATCH_SIZE, pause: PAUSE, interval: INTERVAL, grace: GRACE }
    }

    /// Sets the number of records that one transaction deletes. The default is 1000. A batch holds its row locks and
    /// its memory until its end. A batch of more than some tens of thousands of records hardly saves round trips.
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
    /// Panics if the pause is over a day.
    #[must_use]
    #[track_caller]
    pub fn pause(mut self, pause: Duration) -> Self {
        assert!(pause <= *INTERVALS.end(), "a pause must be at most a day");
        self.pause = pause;
        self
    }

    /// Sets the longest time from the start of one pass of [`run`](Self::run) to the start of the next pass. The
    /// default is a minute. The actual time between two starts is random, from half of the interval to the whole
    /// interval. With a longer interval, more expired rows wait for their deletion.
    ///
    /// # Panics
    ///
    /// Panics if the interval is under a second or over a day.
    #[must_use]
    #[track_caller]
    pub fn interval(mut self, interval: Duration) -> Self {
        assert!(is_in(&INTERVALS, interval), "the interval of a janitor must be between a second and a day");
        self.interval = interval;
        self
    }

    /// Sets how long an expired record is kept. The default is a minute. The grace does not prolong the retention, so
    /// an expired key is new at once. The janitor keeps the record for a duplicate that was made before the record
    /// expired and that still waits for its answer.
    ///
    /// Make the grace longer than the longest wait and the longest upload of your service. For the HTTP layer, the time
    /// of the request's arrival decides whether a record has expired, but the layer reads the body before it looks for
    /// the record. If the record is deleted during the upload, the operation is performed again.
    ///
    /// # Panics
    ///
    /// Panics if the grace is over ten years, which is the longest retention.
    #[must_use]
    #[track_caller]
    pub fn grace(mut self, grace: Duration) -> Self {
        assert!(grace <= *RETENTION.end(), "a grace must be at most ten years");
        self.grace = grace;
        self
    }
}

/// The records that one sweep deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Swept {
    /// Completed records. The keys of these records are new again.
    pub completed: u64,
    /// Records of operations that failed or lapsed and were not claimed again.
    pub unfinished: u64,
    /// [Indeterminate](crate::operator::State::Indeterminate) records. **The effects of these records may have
    /// happened, and their keys are new again**, so a retry performs the operation again. The sweep also logs a
    /// warning. In transaction mode, each such record comes from [a mistake of its
    /// caller](crate::Error::Indeterminate), so find the cause.
    pub indeterminate: u64,
    /// Marks.
    pub marks: u64,
    /// Transactions that deleted records.
    pub batches: u64,
    /// Whether the limit or a shutdown ended the sweep while more records were due.
    pub limited: bool,
    /// The time since the oldest expired record expired, measured at the end of the sweep. `None` if no record was due.
    /// A record can remain because another transaction has locked it, because it became due during the sweep, or
    /// because the sweep was [`limited`](Self::limited).
    pub oldest_after: Option<Duration>,
}

impl Swept {
    /// The number of deleted records.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.completed + self.unfinished + self.indeterminate + self.marks
    }

    fn add(&mut self, deleted: Deleted) {
        self.completed += deleted.completed;
        self.unfinished += deleted.unfinished;
        self.indeterminate += deleted.indeterminate;
        self.marks += deleted.marks;
        self.batches += u64::from(deleted.rows() > 0);
    }

    /// The outcome for the sweep's span.
    fn outcome(&self) -> &'static str {
        if self.limited { "limited" } else { "done" }
    }
}

impl Janitor {
    /// Deletes at most `limit` records that are past their retention and the [grace](Self::grace). Each batch is a
    /// transaction of its own. The sweep skips records under a live lease, and records that another transaction has
    /// locked.
    ///
    /// # Errors
    ///
    /// [`Error::Database`], [`Error::SchemaMissing`], [`Incompatible::Schema`](crate::Incompatible::Schema) if the
    /// schema cannot be trusted, and [`Error::Unanswered`] if the server does not answer a batch within the
    /// [interval](Self::interval) (at least 10 seconds, at most a minute). The deletions of other batches remain. After
    /// an error other than `Unanswered` in one partition, the sweep continues with the other partitions, and returns
    /// the first error.
    ///
    /// # Cancellation
    ///
    /// The future may be dropped at every point. The batch in progress is rolled back, or its COMMIT was already sent
    /// and may take effect.
    pub async fn sweep_once(&self, limit: u64) -> Result<Swept, Error> {
        self.sweep(limit, self.batch_size.get(), None, &mut Shutdown::Never).await
    }

    /// Sweeps like [`sweep_once`](Self::sweep_once), but also stops when `stop` is ready. The sweep then finishes the
    /// batch in progress and reports the lag, with a limit of 5 seconds for each of the two. If the batch takes longer,
    /// its connection is closed.
    pub async fn sweep_until(&self, limit: u64, stop: impl Future<Output = ()> + Send) -> Result<Swept, Error> {
        let stop = pin!(stop);
        self.sweep(limit, self.batch_size.get(), None, &mut Shutdown::When(stop)).await
    }

    /// Sweeps at each [interval](Self::interval) until `shutdown` is ready. After the shutdown, the loop ends within 10
    /// seconds, after the batch in progress and the report of the lag. The first sweep begins after a random time of at
    /// most one interval. A sweep lasts for one interval at most, so that a slow janitor also reports its lag. After a
    /// sweep that took a whole interval, the next sweep follows at once.
    ///
    /// After an error, the janitor logs the error, and tries again after a second. Each further error doubles this
    /// pause, up to the interval. If a batch times out, later batches have half its size. The size grows back after
    /// sweeps that succeed.
    ///
    /// # Cancellation
    ///
    /// The future may be dropped at every point. The consequences are the same as for [`sweep_once`](Self::sweep_once).
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) {
        observe::sweeps(Deleted::default().kinds());
        let mut batch_size = self.batch_size.get();
        let shutdown = pin!(shutdown);
        let mut passes = Passes::of("a sweep", None, self.interval, shutdown);
        while passes.next().await {
            let shutdown = &mut passes.shutdown;
            let started = Instant::now();
            let next = match self.sweep(u64::MAX, batch_size, Some(started + self.interval), shutdown).await {
                Ok(swept) => {
                    let (rows, batches) = (swept.rows(), swept.batches);
                    tracing::info!(rows, batches, unfinished = swept.unfinished, "swept");
                    self.observe_records(shutdown).await;
                    batch_size = batch_size.saturating_mul(2).min(self.batch_size.get());
                    Next::AfterInterval { less: started.elapsed() }
                }
                Err(error) => {
                    if is_timeout(&error) {
                        batch_size = (batch_size / 2).max(SMALLEST_BATCH.min(self.batch_size.get()));
                    }
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        batch_size,
                        "a sweep failed and is tried again"
                    );
                    // If no sweep succeeds, the reported lag must grow nevertheless. An error of the report is ignored,
                    // because the error of the sweep is already in the log.
                    if !shutdown.is_ready().await {
                        let _ = self.observe_lag(shutdown).await;
                    }
                    Next::AfterError
                }
            };
            passes.ended(Ok(Ok(next)));
        }
    }
}

impl Janitor {
    /// Sweeps in a span. The sweep ends when no record is due, when the limit or the deadline is reached, or when
    /// `shutdown` is ready.
    async fn sweep(
        &self,
        limit: u64,
        batch_size: u32,
        deadline: Option<Instant>,
        shutdown: &mut Shutdown<'_>,
    ) -> Result<Swept, Error> {
        let span = tracing::debug_span!(
            target: "pg_idempotency",
            "janitor.sweep",
            rows = tracing::field::Empty,
            batches = tracing::field::Empty,
            outcome = tracing::field::Empty
        );
        let sweep = self.sweep_parts(limit, batch_size, deadline, shutdown).instrument(span.clone());
        observe::spanned(pin!(sweep), |swept| {
            swept.as_ref().map_or_else(Error::outcome, |swept| {
                span.record("rows", swept.rows()).record("batches", swept.batches);
                swept.outcome()
            })
        })
        .await
    }

    async fn sweep_parts(
        &self,
        limit: u64,
        batch_size: u32,
        deadline: Option<Instant>,
        shutdown: &mut Shutdown<'_>,
    ) -> Result<Swept, Error> {
        let mut swept = Swept::default();
        let mut parts = self
            .transaction(shutdown, async |conn| {
                // One check for each sweep is enough, because a trusted schema stays trusted.
                migrate::trusted(conn).await?;
                Part::all(conn).await
            })
            .await?;
        // Each sweep begins at a random part, because a part that takes the whole time of each sweep must not exclude
        // the later parts.
        begin_anywhere(&mut parts);
        let mut failed = None;
        for part in parts {
            let sweeping = self.sweep_part(&part, limit, batch_size, deadline, shutdown, &mut swept);
            if let Err(error) = sweeping.await {
                tracing::debug!(?part, error = &error as &dyn std::error::Error, "a part of the table was not swept");
                // If the server does not answer, each further part would also fail after a wait.
                let unanswered = matches!(error, Error::Unanswered);
                failed.get_or_insert(error);
                if unanswered {
                    break;
                }
            }
            if swept.limited {
                break;
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        swept.oldest_after = self.observe_lag(shutdown).await?;
        swept.limited &= swept.oldest_after.is_some();
        Ok(swept)
    }

    /// Returns how long ago the oldest due record expired, and exports this time as a metric.
    async fn observe_lag(&self, shutdown: &mut Shutdown<'_>) -> Result<Option<Duration>, Error> {
        let looking = async |conn: &mut PgConnection| {
            migrate::trusted(conn).await?;
            record::oldest_due(conn, self.grace).await
        };
        let oldest = self.transaction(shutdown, looking).await?;
        observe::oldest_expired(oldest);
        Ok(oldest)
    }

    /// Runs one transaction of the sweep. If the server does not answer in time, or not soon enough after a shutdown,
    /// closes the connection and returns [`Error::Unanswered`].
    async fn transaction<R>(
        &self,
        shutdown: &mut Shutdown<'_>,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let limit = self.interval.clamp(*BATCH_TIME.start(), *BATCH_TIME.end());
        let work = in_pooled_transaction(&self.pool, Opening::ALL_ROWS, work);
        ended_or_closed(shutdown.or_after(limit, LAST_BATCH), work).await.unwrap_or(Err(Error::Unanswered))
    }

    /// Sweeps one part of the table, until the part has no more due records, or the sweep is
    /// [`limited`](Swept::limited).
    async fn sweep_part(
        &self,
        part: &Part,
        limit: u64,
        batch_size: u32,
        deadline: Option<Instant>,
        shutdown: &mut Shutdown<'_>,
        swept: &mut Swept,
    ) -> Result<(), Error> {
        let mut since = None;
        loop {
            let left = limit.saturating_sub(swept.rows());
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if left == 0 || is_over || shutdown.is_ready().await {
                swept.limited = true;
                return Ok(());
            }
            let rows = u32::try_from(left).unwrap_or(batch_size).min(batch_size);
            let started = Instant::now();
            let batch =
                self.transaction(shutdown, async |conn| part.sweep(conn, rows, since, self.grace).await).await?;
            since = batch.until;
            observe::swept(batch.kinds(), started.elapsed());
            if batch.indeterminate > 0 {
                tracing::warn!(
                    records = batch.indeterminate,
                    "deleted indeterminate records: their effects may have happened, and a retry performs again; \
                     settle such keys before they expire (unsettled lists them), or make the retention longer"
                );
            }
            swept.add(batch);
            if batch.rows() < u64::from(rows) {
                return Ok(());
            }
            if swept.rows() < limit {
                let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                unless(shutdown, tokio::time::sleep(self.pause.min(left.unwrap_or(self.pause)))).await;
            }
        }
    }

    /// Counts the records by state from a sample, which is cheap for any table. An error of the count is ignored,
    /// because the next pass counts again.
    async fn observe_records(&self, shutdown: &mut Shutdown<'_>) {
        let stats = ended_or_closed(shutdown.or_after(COUNT_TIME, Duration::ZERO), stats(&self.pool));
        let Some(Ok(stats)) = stats.await else { return };
        let records_in =
            |state: State| stats.groups.iter().filter(|group| group.state == state).map(|group| group.records).sum();
        observe::records(State::ALL.iter().map(|state| (state.to_string(), records_in(*state))));
    }
}

/// Whether a smaller batch may succeed, because a time-out has ended this batch. A server that does not answer may be
/// busy with the batch.
fn is_timeout(error: &Error) -> bool {
    match error {
        Error::Unanswered => true,
        Error::Database(error) => {
            matches!(sqlstate(error).as_deref(), Some(sqlstate::QUERY_CANCELED | sqlstate::LOCK_NOT_AVAILABLE))
        }
        _ => false,
    }
}
