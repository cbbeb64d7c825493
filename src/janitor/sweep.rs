//! One bounded pass over the table.

use std::pin::pin;
use std::time::{Duration, Instant};

use sqlx::PgConnection;

use super::{Janitor, Swept};
use crate::error::sqlstate;
use crate::record;
use crate::session::{Opening, in_pooled_transaction};
use crate::shutdown::{Shutdown, is_ready, unless};
use crate::{Error, observe};

impl Janitor {
    /// Deletes at most `limit` records that are past their retention, in a transaction for each batch. Records under a
    /// live lease stay, and so do records that another transaction has locked.
    ///
    /// # Errors
    ///
    /// [`Error::Database`] and [`Error::SchemaMissing`]. The deletions of earlier batches remain.
    ///
    /// # Cancellation
    ///
    /// Safe at every point: the batch in progress is rolled back, or its COMMIT was already sent and may take effect.
    pub async fn sweep_once(&self, limit: u64) -> Result<Swept, Error> {
        self.sweep_until(limit, std::future::pending()).await
    }

    /// As [`sweep_once`](Self::sweep_once), with the same errors and the same cancellation, but it ends within one batch
    /// after `stop` is ready.
    pub async fn sweep_until(&self, limit: u64, stop: impl Future<Output = ()>) -> Result<Swept, Error> {
        let stop = pin!(stop);
        self.sweep(limit, self.batch_size.get(), &mut Shutdown::new(stop)).await
    }

    /// Sweeps in a span, until nothing is due, the limit is reached, or `shutdown` is ready.
    pub(super) async fn sweep(
        &self,
        limit: u64,
        batch_size: u32,
        shutdown: &mut (impl Future<Output = ()> + Unpin),
    ) -> Result<Swept, Error> {
        let span = tracing::debug_span!(
            target: "pg_idempotency",
            "janitor.sweep",
            rows = tracing::field::Empty,
            batches = tracing::field::Empty,
            outcome = tracing::field::Empty
        );
        observe::spanned(span.clone(), self.sweep_leaves(limit, batch_size, shutdown), |swept| {
            swept.as_ref().map_or_else(Error::outcome, |swept| {
                span.record("rows", swept.rows()).record("batches", swept.batches);
                swept.outcome()
            })
        })
        .await
    }

    async fn sweep_leaves(
        &self,
        limit: u64,
        batch_size: u32,
        shutdown: &mut (impl Future<Output = ()> + Unpin),
    ) -> Result<Swept, Error> {
        let mut swept = Swept::default();
        let looking = in_pooled_transaction(&self.pool, Opening::Plain, async |conn| -> Result<_, Error> {
            match record::is_distributed(conn).await? {
                true => Ok(vec![None]),
                false => Ok(record::leaves(conn).await?.into_iter().map(Some).collect()),
            }
        });
        for leaf in looking.await? {
            self.sweep_leaf(leaf.as_deref(), limit, batch_size, shutdown, &mut swept).await?;
            if swept.limited {
                break;
            }
        }
        swept.oldest_after = self.observe_lag().await?;
        swept.limited &= swept.oldest_after.is_some();
        Ok(swept)
    }

    /// Exports how long the oldest record has been due, and returns it.
    pub(super) async fn observe_lag(&self) -> Result<Option<Duration>, Error> {
        let looking = async |conn: &mut PgConnection| record::oldest_due(conn, self.grace).await;
        let oldest = in_pooled_transaction(&self.pool, Opening::Plain, looking).await?;
        observe::oldest_expired(oldest);
        Ok(oldest)
    }

    /// Sweeps one leaf of the table, or a distributed table as a whole, until nothing more is due in it or the sweep is
    /// [`limited`](Swept::limited).
    async fn sweep_leaf(
        &self,
        leaf: Option<&str>,
        limit: u64,
        batch_size: u32,
        shutdown: &mut (impl Future<Output = ()> + Unpin),
        swept: &mut Swept,
    ) -> Result<(), Error> {
        let mut since = None;
        loop {
            let left = limit.saturating_sub(swept.rows());
            if left == 0 || is_ready(shutdown).await {
                swept.limited = true;
                return Ok(());
            }
            let rows = u32::try_from(left).unwrap_or(batch_size).min(batch_size);
            let started = Instant::now();
            let batch = in_pooled_transaction(&self.pool, Opening::Plain, async |conn| match leaf {
                Some(leaf) => record::sweep(conn, leaf, rows, since, self.grace).await,
                None => record::sweep_distributed(conn, rows, since, self.grace).await,
            })
            .await;
            let batch = match batch {
                // Another session has locked a record that is due: it is left to the next pass, with what expired
                // later.
                Err(Error::Database(error))
                    if leaf.is_none() && sqlstate(&error).as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE) =>
                {
                    swept.limited = true;
                    return Ok(());
                }
                batch => batch?,
            };
            since = batch.until;
            observe::swept(batch.kinds(), started.elapsed());
            swept.add(batch);
            if batch.rows() < u64::from(rows) {
                return Ok(());
            }
            if swept.rows() < limit {
                unless(shutdown, tokio::time::sleep(self.pause)).await;
            }
        }
    }
}
