//! One bounded pass over the table.

use std::ops::RangeInclusive;
use std::pin::pin;
use std::time::{Duration, Instant};

use sqlx::PgConnection;

use super::{Janitor, Swept};
use crate::background::{Shutdown, begin_anywhere, unless};
use crate::error::sqlstate;
use crate::record::{self, Part};
use crate::session::{Opening, ended_or_closed, in_pooled_transaction};
use crate::{Error, migrate, observe};

/// How long a transaction of the sweep waits for the server: the interval, within these limits. A batch takes
/// milliseconds. After this time the server or the network counts as lost.
const BATCH_TIME: RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(60);

/// How long a shutdown waits for the batch in progress. Service managers kill a process after 30 seconds or later.
const LAST_BATCH: Duration = Duration::from_secs(5);

impl Janitor {
    /// Deletes at most `limit` records that are past their retention and the [grace](Self::grace), in one transaction
    /// for each batch. It skips records under a live lease, and records that another transaction has locked.
    ///
    /// # Errors
    ///
    /// [`Error::Database`], [`Error::SchemaMissing`], [`Incompatible::Schema`](crate::Incompatible::Schema) if the
    /// schema cannot be trusted, and [`Error::Unanswered`] if the server does not answer a batch within the
    /// [interval](Self::interval) (at least 10 seconds, at most a minute). The deletions of other batches remain. After
    /// an error of one partition, the sweep goes on with the others, and returns the first error.
    ///
    /// # Cancellation
    ///
    /// Safe at every point. The batch in progress is rolled back, or its COMMIT was already sent and may take effect.
    pub async fn sweep_once(&self, limit: u64) -> Result<Swept, Error> {
        self.sweep(limit, self.batch_size.get(), None, &mut Shutdown::Never).await
    }

    /// As [`sweep_once`](Self::sweep_once), but after `stop` is ready it ends after the batch in progress and the
    /// report of the lag, each within 5 seconds. The connection of a batch that takes longer is closed.
    pub async fn sweep_until(&self, limit: u64, stop: impl Future<Output = ()> + Send) -> Result<Swept, Error> {
        let stop = pin!(stop);
        self.sweep(limit, self.batch_size.get(), None, &mut Shutdown::When(stop)).await
    }

    /// Sweeps in a span, until nothing is due, the limit or the deadline is reached, or `shutdown` is ready.
    pub(super) async fn sweep(
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
        observe::spanned(span.clone(), self.sweep_parts(limit, batch_size, deadline, shutdown), |swept| {
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
                // Once for each sweep: a trusted schema remains one.
                migrate::trusted(conn).await?;
                Part::all(conn).await
            })
            .await?;
        // A part that takes the whole time of each sweep must not keep the later ones from theirs.
        begin_anywhere(&mut parts);
        let mut failed = None;
        for part in parts {
            let sweeping = self.sweep_part(&part, limit, batch_size, deadline, shutdown, &mut swept);
            if let Err(error) = sweeping.await {
                tracing::debug!(?part, error = &error as &dyn std::error::Error, "a part of the table was not swept");
                // A server that does not answer would fail for each part, after a wait each time.
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

    /// Exports how long the oldest record has been due, and returns it.
    pub(super) async fn observe_lag(&self, shutdown: &mut Shutdown<'_>) -> Result<Option<Duration>, Error> {
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
        let work = in_pooled_transaction(&self.pool, Opening::AllRows, work);
        ended_or_closed(shutdown.or_after(limit, LAST_BATCH), work).await.unwrap_or(Err(Error::Unanswered))
    }

    /// Sweeps one part of the table, until nothing more is due in it or the sweep is [`limited`](Swept::limited).
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
            let batch = self.transaction(shutdown, async |conn| part.sweep(conn, rows, since, self.grace).await).await;
            let batch = match batch {
                // Another session has locked a record that is due. The next pass deletes it, and the records that
                // expired later.
                Err(Error::Database(error))
                    if part.waits_for_rows() && sqlstate(&error).as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE) =>
                {
                    swept.limited = true;
                    return Ok(());
                }
                batch => batch?,
            };
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
}
