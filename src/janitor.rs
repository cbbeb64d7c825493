//! The janitor: deletes records that are past their retention, a batch at a time.
//!
//! It is never on the path of correctness: an expired record is dead to a claim whether or not it was swept. It gives back
//! the space. Run it from cron (`idempotency-janitor sweep`), or let each process of a service [`run`](Janitor::run) one:
//! they share the work, since each skips what another has locked.
//!
//! # Does it keep up?
//!
//! While it is busy it deletes `batch size / (time of a batch + pause)` rows a second, which is [`Janitor::capacity`]. With
//! the defaults and 10 ms for a batch of 1000 that is 16 000. For 20 000 inserts a second take batches of 10 000, which take
//! some 100 ms: 66 000. The interval decides only how much waits for the next pass: at 20 000 a second and 60 s, 1.2 million
//! rows, some 18 s of work. Where the oldest expired record gets older from pass to pass, a warning is logged.

mod options;
mod run;

use std::pin::pin;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, PgPool};

use crate::error::sqlstate;
use crate::record::{self, Batch};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, observe};

pub use options::{InvalidBatchSize, MAX_BATCH_SIZE};

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
    pool: PgPool,
    options: options::Options,
}

/// What one sweep deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Swept {
    /// Completed records: their responses are forgotten, their keys are new again.
    pub completed: u64,
    /// Records that were never completed. In transaction mode each is a caller who committed after an error: worth a look.
    pub unfinished: u64,
    /// Marks.
    pub marks: u64,
    /// Transactions that deleted something.
    pub batches: u64,
    /// Whether the limit or a shutdown ended the sweep while more was due.
    pub limited: bool,
    /// Whether another session had the lock of the [single runner](Janitor::with_single_runner), so that this sweep ended. The
    /// log names that session.
    pub yielded: bool,
    /// How long it took.
    pub duration: Duration,
    /// For how long the oldest expired record had been due when the sweep began; `None` where none was.
    pub oldest_before: Option<Duration>,
    /// The same, when the sweep ended. What is left then is locked by somebody, or came due meanwhile, or `limited`.
    pub oldest_after: Option<Duration>,
}

impl Swept {
    /// All records that were deleted.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.completed + self.unfinished + self.marks
    }

    fn add(&mut self, batch: Batch) {
        self.completed += batch.completed;
        self.unfinished += batch.unfinished;
        self.marks += batch.marks;
        self.batches += u64::from(batch.rows() > 0);
    }
}

/// What would be deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DueRecords {
    /// Completed records.
    pub completed: u64,
    /// Records that were never completed.
    pub unfinished: u64,
    /// Marks.
    pub marks: u64,
}

impl Janitor {
    /// A janitor that takes its connections from this pool, one at a time, in batches of 1000 with 50 ms between two.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { pool, options: options::Options::default() }
    }

    /// Deletes what is past its retention, at most `limit` records, a transaction for each batch. Records under a live lease
    /// stay, and so do those that somebody has locked.
    ///
    /// # Errors
    ///
    /// [`Error::Database`] and [`Error::SchemaMissing`]; what earlier batches deleted stays deleted.
    ///
    /// # Cancellation
    ///
    /// Safe at every point: the batch under way is rolled back, or its COMMIT decides.
    pub async fn sweep_once(&self, limit: u64) -> Result<Swept, Error> {
        self.sweep_until(limit, std::future::pending(), |_| {}).await
    }

    /// [`sweep_once`](Self::sweep_once) that ends within a batch when `shutdown` is ready, a time limit or a signal, and tells
    /// after each batch how far it is.
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
        let mut shutdown = run::Shutdown::new(shutdown);
        self.sweep(limit, self.options.batch_size, &mut shutdown, progress).await
    }

    /// Counts what a sweep would delete, and deletes nothing. It reads every row that is due.
    ///
    /// # Errors
    ///
    /// [`Error::Database`] and [`Error::SchemaMissing`].
    pub async fn dry_run(&self) -> Result<DueRecords, Error> {
        let Batch { completed, unfinished, marks, .. } =
            in_pooled_transaction(&self.pool, Opening::Plain, async |conn| {
                record::count_due(conn, self.options.grace).await
            })
            .await?;
        Ok(DueRecords { completed, unfinished, marks })
    }

    /// Sweeps until nothing is due, the limit is reached, or `shutdown` is ready, which it asks between batches.
    async fn sweep(
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
                match swept {
                    Swept { yielded: true, .. } => "yielded",
                    Swept { limited: true, .. } => "limited",
                    _ => "done",
                }
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
        'leaves: for leaf in leaves {
            let mut since = None;
            let mut distributed = self.options.deployment.distributed;
            loop {
                let left = limit.saturating_sub(swept.rows());
                if left == 0 || run::is_ready(shutdown).await {
                    swept.limited = true;
                    break 'leaves;
                }
                let rows = u32::try_from(left).unwrap_or(batch_size).min(batch_size);
                let batch_started = Instant::now();
                let batch = in_pooled_transaction(&self.pool, Opening::Plain, async |conn| {
                    self.batch(conn, leaf, rows, since, distributed).await
                })
                .await;
                let batch = match batch {
                    // The table is distributed after all: the batch was rolled back, and its other form is tried.
                    Err(error @ Error::WrongDeployment { .. }) if !distributed => {
                        observe::wrong_deployment(&error);
                        distributed = true;
                        continue;
                    }
                    // Somebody holds a record that is due: it is left to the next pass, with what expired after it.
                    Err(Error::Database(error)) if distributed && sqlstate(&error).as_deref() == Some("55P03") => {
                        swept.limited = true;
                        break;
                    }
                    batch => batch?,
                };
                let Some(batch) = batch else {
                    swept.yielded = true;
                    break 'leaves;
                };
                since = batch.until;
                observe::swept(&batch, batch_started.elapsed());
                swept.add(batch);
                progress(&swept);
                if batch.rows() < u64::from(rows) {
                    break;
                }
                if swept.rows() < limit {
                    run::unless(shutdown, tokio::time::sleep(self.options.pause_after(rows, batch_started.elapsed())))
                        .await;
                }
            }
        }
        swept.oldest_after = self.oldest().await?;
        swept.limited &= swept.oldest_after.is_some();
        observe::oldest_expired(swept.oldest_after);
        swept.duration = started.elapsed();
        Ok(swept)
    }

    /// `None` where another runner has the floor.
    async fn batch(
        &self,
        conn: &mut PgConnection,
        leaf: Option<u32>,
        rows: u32,
        since: Option<DateTime<Utc>>,
        distributed: bool,
    ) -> Result<Option<Batch>, Error> {
        if self.options.single_runner && !record::try_lock(conn, record::SINGLE_RUNNER).await? {
            observe::yielded(record::holder(conn, record::SINGLE_RUNNER).await?.as_ref());
            return Ok(None);
        }
        if distributed {
            return record::sweep_distributed(conn, rows, since, self.options.grace).await.map(Some);
        }
        record::sweep(conn, leaf, rows, since, self.options.grace).await.map(Some)
    }

    async fn oldest(&self) -> Result<Option<Duration>, Error> {
        in_pooled_transaction(&self.pool, Opening::Plain, async |conn| {
            record::oldest_due(conn, self.options.grace).await
        })
        .await
    }
}
