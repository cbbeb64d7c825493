//! The janitor: deletes records that are past their retention, a batch at a time.
//!
//! It is never on the path of correctness: an expired record is dead to a claim whether or not it was swept. It gives back
//! the space.

use std::time::Duration;

use sqlx::PgPool;

use crate::Error;
use crate::record::{self, Batch};
use crate::transaction::{Durability, in_own_transaction};

/// Small enough that a batch takes milliseconds and a claim of a swept key hardly waits.
const BATCH_ROWS: u32 = 1000;

/// With 1000 rows a batch this costs the foreground 6 to 9 % of its throughput; without a pause it is 27 to 45 %.
const PAUSE: Duration = Duration::from_millis(50);

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
}

/// What one sweep deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Whether the limit ended the sweep, so that more may be due.
    pub limited: bool,
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

impl Janitor {
    /// A janitor that takes its connections from this pool, one at a time.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Deletes what is past its retention, at most `limit` records, in batches of 1000 with a transaction each and a pause
    /// of 50 ms after a full one. Records under a live lease stay, and so do those that somebody has locked.
    ///
    /// # Errors
    ///
    /// [`Error::Database`] and [`Error::SchemaMissing`]; what earlier batches deleted stays deleted.
    ///
    /// # Cancellation
    ///
    /// Safe at every point: the batch under way is rolled back, or its COMMIT decides.
    pub async fn sweep_once(&self, limit: u64) -> Result<Swept, Error> {
        let mut swept = Swept::default();
        loop {
            let left = limit.saturating_sub(swept.rows());
            if left == 0 {
                swept.limited = true;
                return Ok(swept);
            }
            let rows = u32::try_from(left).unwrap_or(BATCH_ROWS).min(BATCH_ROWS);
            let mut conn = self.pool.acquire().await?;
            let batch = in_own_transaction(&mut conn, Durability::AsItIs, async |conn| record::sweep(conn, rows).await)
                .await??;
            drop(conn);
            swept.add(batch);
            if batch.rows() < u64::from(rows) {
                return Ok(swept);
            }
            if swept.rows() < limit {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
