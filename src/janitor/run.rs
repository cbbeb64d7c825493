//! The loop around a sweep, which staggers and paces the sweeps and goes on after an error.

use std::pin::pin;
use std::time::{Duration, Instant};

use super::Janitor;
use crate::Error;
use crate::background::{Next, Passes, Shutdown};
use crate::error::sqlstate;
use crate::session::ended_or_closed;

/// The smallest batch after time-outs. A smaller batch would fail for another reason than its size.
const SMALLEST_BATCH: u32 = 10;

/// How long a count may take. A sample of 30,000 records takes a moment.
const COUNT_TIME: Duration = Duration::from_secs(60);

impl Janitor {
    /// Sweeps at each [interval](Self::interval) until `shutdown` is ready. Then it ends within 10 seconds, after the
    /// batch in progress and the report of the lag. The first sweep begins after an interval. A sweep ends after an
    /// interval at the latest, and the next one follows at once, so the lag of a slow janitor is reported, too.
    ///
    /// After an error, the janitor logs the error and tries again, at first after a second. If a batch times out, later
    /// batches have half its size. The size grows back after sweeps that succeed.
    ///
    /// # Cancellation
    ///
    /// Safe at every point, as [`sweep_once`](Self::sweep_once).
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) {
        crate::observe::sweeps(crate::record::Deleted::default().kinds());
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
                    // If no sweep succeeds, the lag has to grow nevertheless. The error is already in the log.
                    if !shutdown.is_ready().await {
                        let _ = self.observe_lag(shutdown).await;
                    }
                    Next::AfterError
                }
            };
            passes.ended(Ok(Ok(next)));
        }
    }

    /// Counts the records by state from a sample, which is cheap for any table. It ignores an error, because the next
    /// pass counts again.
    async fn observe_records(&self, shutdown: &mut Shutdown<'_>) {
        use crate::operator::{State, stats};
        let stats = ended_or_closed(shutdown.or_after(COUNT_TIME, Duration::ZERO), stats(&self.pool));
        let Some(Ok(stats)) = stats.await else { return };
        let records_in =
            |state: State| stats.groups.iter().filter(|group| group.state == state).map(|group| group.records).sum();
        crate::observe::records(State::ALL.iter().map(|state| (state.to_string(), records_in(*state))));
    }
}

/// 57014 is a `statement_timeout`, 55P03 is a `lock_timeout`. A server that does not answer may be busy with the batch.
fn is_timeout(error: &Error) -> bool {
    match error {
        Error::Unanswered => true,
        Error::Database(error) => {
            matches!(sqlstate(error).as_deref(), Some(sqlstate::QUERY_CANCELED | sqlstate::LOCK_NOT_AVAILABLE))
        }
        _ => false,
    }
}
