//! The end of a claim whose call has failed before its work began.
//!
//! A call may get no answer to the COMMIT of its claim, because the answer is lost or the call's future is dropped. The
//! COMMIT may take effect nevertheless. Only this process knows that the work has not begun, so [`Unbegun`] releases
//! the claim in the background. Without the release, the key would stay indeterminate under `AtMostOnce`, and in flight
//! for a whole lease under the other policies. The service's role may not delete rows, so the record of a first claim
//! stays, with attempt 0.

use std::time::Duration;

use sqlx::PgPool;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::handle::time_to_end;
use crate::background::jittered;
use crate::record::{Opening, Record, ReleaseOfUnbegun};
use crate::session::{ANSWER_TIME, bounded, in_pooled_transaction};
use crate::{Error, Key};

/// How many releases may run at the same time in this process. A release follows a COMMIT without an answer, and each
/// such COMMIT was sent on a different connection. So if this many releases are running, the database is not reachable,
/// and further claims lapse.
static RELEASES: Semaphore = Semaphore::const_new(256);

/// The first and the longest pause between two tries of a release. The pause doubles, because the COMMIT of the claim
/// may be waiting for a standby server.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A claim whose work has not begun. If this value is dropped before [`begin`](Self::begin), the claim is released in
/// the background.
#[derive(Debug)]
pub(super) struct Unbegun(Option<Box<Given>>);

#[derive(Debug)]
struct Given {
    pool: PgPool,
    key: Key,
    persistent: bool,
    token: i64,
    lease: Duration,
    /// The Tokio runtime of the call, which is stored because a future may be dropped outside any runtime.
    runtime: Handle,
}

impl Unbegun {
    /// Makes the guard for a claim that the open transaction will commit next.
    ///
    /// # Panics
    ///
    /// Panics if there is no Tokio runtime.
    pub(super) fn of(pool: &PgPool, record: Record<'_>, token: i64, lease: Duration) -> Self {
        Self(Some(Box::new(Given {
            pool: pool.clone(),
            key: record.key.clone(),
            persistent: record.persistent,
            token,
            lease,
            runtime: Handle::current(),
        })))
    }

    /// Disarms the release, because the work begins now, or because other code now decides about the claim.
    pub(super) fn begin(&mut self) {
        self.0 = None;
    }

    pub(super) fn has_begun(&self) -> bool {
        self.0.is_none()
    }
}

impl Drop for Unbegun {
    fn drop(&mut self) {
        let Some(given) = self.0.take() else { return };
        let Ok(permit) = RELEASES.try_acquire() else {
            given.lapses(None);
            return;
        };
        let runtime = given.runtime.clone();
        // A runtime that has been shut down drops the task.
        runtime.spawn(async move {
            given.release().await;
            drop(permit);
        });
    }
}

impl Given {
    /// Tries to release the claim until the end of the claim is known, for at most the [`time_to_end`]. Between two
    /// tries, the function holds no connection.
    async fn release(self: Box<Self>) {
        let deadline = Instant::now() + time_to_end(self.lease);
        let mut pause = FIRST_PAUSE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let error = match bounded(left.min(ANSWER_TIME), self.try_once()).await {
                Ok(ReleaseOfUnbegun::Decided { released }) => {
                    tracing::debug!(
                        operation = self.key.operation(),
                        token = self.token,
                        released,
                        "a claim whose call had failed before its work began has ended"
                    );
                    return;
                }
                Ok(ReleaseOfUnbegun::Held) => None,
                Err(error) => Some(error),
            };
            let next = Instant::now() + jittered(pause);
            if next >= deadline || self.pool.is_closed() {
                self.lapses(error.as_ref());
                return;
            }
            tokio::time::sleep_until(next).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn try_once(&self) -> Result<ReleaseOfUnbegun, Error> {
        let record = Record { key: &self.key, persistent: self.persistent };
        in_pooled_transaction(&self.pool, Opening::READ_COMMITTED, async |conn| {
            record.release_unbegun(conn, self.token).await
        })
        .await
    }

    fn lapses(&self, error: Option<&Error>) {
        tracing::warn!(
            operation = self.key.operation(),
            token = self.token,
            error = error.map(|error| error as &dyn std::error::Error),
            "a claim whose call had failed before its work began could not be released; it lapses"
        );
    }
}
