//! One bounded pass over the table.

use std::pin::pin;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use super::{DueRecords, Janitor, Swept};
use crate::error::sqlstate;
use crate::record::{self, Batch};
use crate::session::{Opening, in_pooled_transaction};
use crate::shutdown::{Shutdown, is_ready, unless};
use crate::{Error, observe};

/// How the sweep of one leaf of the table ended.
enum LeafEnd {
    /// Nothing more is due in it.
    Done,
    /// The limit is reached, or the caller asked for a shutdown.
    Limited,
}

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
        self.sweep_until(limit, std::future::pending(), |_| {}).await
    }

    /// Sweeps as [`sweep_once`](Self::sweep_once). When `shutdown` is ready, for instance after a time limit or a
    /// signal, it finishes at most the batch in progress, and ends. It calls `progress` after each batch with the
    /// counts so far.
    ///
    /// # Errors
    ///
    /// As [`sweep_once`](Self::sweep_once).
    ///
    /// # Cancellation
    ///
    /// As [`sweep_once`](Self::sweep_once).
    pub async fn sweep_until(
        &self,
        limit: u64,
        shutdown: impl Future<Output = ()>,
        progress: impl FnMut(&Swept),
    ) -> Result<Swept, Error> {
        let shutdown = pin!(shutdown);
        let mut shutdown = Shutdown::new(shutdown);
        self.sweep(limit, self.options.batch_size, &mut shutdown, progress).await
    }

    /// Counts the records that a sweep would delete, and deletes nothing. It reads every row that is due.
    ///
    /// # Errors
    ///
    /// [`Error::Database`] and [`Error::SchemaMissing`].
    ///
    /// # Cancellation
    ///
    /// Nothing is changed, at any point.
    pub async fn dry_run(&self) -> Result<DueRecords, Error> {
        let Batch { completed, unfinished, marks, .. } =
            in_pooled_transaction(&self.pool, Opening::Plain, async |conn| {
                record::count_due(conn, self.options.grace).await
            })
            .await?;
        Ok(DueRecords { completed, unfinished, marks })
    }

    /// Sweeps in a span, until nothing is due, the limit is reached, or `shutdown` is ready.
    pub(super) async fn sweep(
        &self,
        limit: u64,
        batch_size: u32,
        shutdown: &mut (impl Future<Output = ()> + Unpin),
        progress: impl FnMut(&Swept),
    ) -> Result<Swept, Error> {
        let span = tracing::debug_span!(
            target: "pg_idempotency",
            "janitor.sweep",
            rows = tracing::field::Empty,
            batches = tracing::field::Empty,
            outcome = tracing::field::Empty
        );
        observe::spanned(span.clone(), self.sweep_leaves(limit, batch_size, shutdown, progress), |swept| {
            observe::outcome_of(swept, |swept| {
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
        mut progress: impl FnMut(&Swept),
    ) -> Result<Swept, Error> {
        let started = Instant::now();
        let mut swept = Swept { oldest_before: self.oldest().await?, ..Swept::default() };
        let leaves = in_pooled_transaction(&self.pool, Opening::Plain, async |conn| record::leaves(conn).await).await?;
        for leaf in leaves {
            match self.sweep_leaf(&leaf, limit, batch_size, shutdown, &mut progress, &mut swept).await? {
                LeafEnd::Done => continue,
                LeafEnd::Limited => swept.limited = true,
            }
            break;
        }
        swept.oldest_after = self.oldest().await?;
        swept.limited &= swept.oldest_after.is_some();
        observe::oldest_expired(swept.oldest_after);
        swept.duration = started.elapsed();
        Ok(swept)
    }

    async fn sweep_leaf(
        &self,
        leaf: &str,
        limit: u64,
        batch_size: u32,
        shutdown: &mut (impl Future<Output = ()> + Unpin),
        progress: &mut impl FnMut(&Swept),
        swept: &mut Swept,
    ) -> Result<LeafEnd, Error> {
        let mut since = None;
        let mut distributed = self.options.deployment.distributed;
        loop {
            let left = limit.saturating_sub(swept.rows());
            if left == 0 || is_ready(shutdown).await {
                return Ok(LeafEnd::Limited);
            }
            let rows = u32::try_from(left).unwrap_or(batch_size).min(batch_size);
            let started = Instant::now();
            let batch = in_pooled_transaction(&self.pool, Opening::Plain, async |conn| {
                self.batch(conn, leaf, rows, since, distributed).await
            })
            .await;
            let batch = match batch {
                // The table is distributed: the batch was rolled back, and the statement for such a table is next.
                Err(error @ Error::WrongDeployment { .. }) if !distributed => {
                    observe::wrong_deployment(&error);
                    distributed = true;
                    continue;
                }
                // Another session has locked a record that is due: it is left to the next pass, with what expired
                // later.
                Err(Error::Database(error))
                    if distributed && sqlstate(&error).as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE) =>
                {
                    return Ok(LeafEnd::Limited);
                }
                batch => batch?,
            };
            since = batch.until;
            observe::swept(batch.kinds(), started.elapsed());
            swept.add(batch);
            progress(swept);
            if batch.rows() < u64::from(rows) {
                return Ok(LeafEnd::Done);
            }
            if swept.rows() < limit {
                unless(shutdown, tokio::time::sleep(self.options.pause)).await;
            }
        }
    }

    /// Deletes one batch.
    async fn batch(
        &self,
        conn: &mut PgConnection,
        leaf: &str,
        rows: u32,
        since: Option<DateTime<Utc>>,
        distributed: bool,
    ) -> Result<Batch, Error> {
        match distributed {
            true => record::sweep_distributed(conn, rows, since, self.options.grace).await,
            false => record::sweep(conn, leaf, rows, since, self.options.grace).await,
        }
    }

    async fn oldest(&self) -> Result<Option<Duration>, Error> {
        in_pooled_transaction(&self.pool, Opening::Plain, async |conn| {
            record::oldest_due(conn, self.options.grace).await
        })
        .await
    }
}
