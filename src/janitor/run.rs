//! The loop around a sweep: staggered, paced, and not ended by an error.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use super::{Janitor, Swept};
use crate::Error;
use crate::error::sqlstate;

/// After an error: soon, since most are over in a moment, and then less and less often.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// A batch this small fails for another reason than its size.
const SMALLEST_BATCH: u32 = 10;

/// In how many passes in a row the backlog must have grown to be worth a warning: one may be a burst.
const GROWING: u32 = 3;

impl Janitor {
    /// Sweeps at every interval until `shutdown` is ready, then ends within a batch. One for each process of a fleet, or
    /// one for all: the start is staggered by a random part of the interval.
    ///
    /// An error is logged and tried again, after a second at first. A batch that runs into a time-out is halved, and grows
    /// back when all is well.
    ///
    /// ```no_run
    /// # async fn f(pool: sqlx::PgPool, shutdown: impl Future<Output = ()>) {
    /// pg_idempotency::Janitor::new(pool).run(shutdown).await;
    /// # }
    /// ```
    ///
    /// # Cancellation
    ///
    /// Safe at every point, as [`sweep_once`](Self::sweep_once).
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let shutdown = pin!(shutdown);
        let mut shutdown = Shutdown::new(shutdown);
        let mut batch_size = self.options.batch_size;
        let mut backlog = Backlog::default();
        let mut retry = FIRST_RETRY;
        let mut rest = self.options.interval.mul_f64(random());
        while unless(&mut shutdown, tokio::time::sleep(rest)).await.is_some() {
            match self.sweep(u64::MAX, batch_size, &mut shutdown, |_| {}).await {
                Ok(swept) => {
                    tracing::info!(
                        rows = swept.rows(),
                        batches = swept.batches,
                        unfinished = swept.unfinished,
                        yielded = swept.yielded,
                        seconds = swept.duration.as_secs_f64(),
                        "swept"
                    );
                    #[cfg(feature = "metrics")]
                    self.observe_records().await;
                    if backlog.grows(&swept) {
                        let oldest_seconds = swept.oldest_after.unwrap_or_default().as_secs_f64();
                        if swept.yielded {
                            tracing::warn!(
                                oldest_seconds,
                                "the backlog of expired records grows while this janitor yields: look at the session that \
                                 has the lock of the single runner"
                            );
                        } else {
                            tracing::warn!(
                                oldest_seconds,
                                "the backlog of expired records grows: raise the batch size, or lower pause or interval"
                            );
                        }
                    }
                    batch_size = batch_size.saturating_mul(2).min(self.options.batch_size);
                    retry = FIRST_RETRY;
                    rest = self.options.interval;
                }
                Err(error) => {
                    if is_timeout(&error) {
                        batch_size = (batch_size / 2).max(SMALLEST_BATCH.min(self.options.batch_size));
                    }
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        batch_size,
                        "a sweep failed and is tried again"
                    );
                    rest = retry.mul_f64(0.5 + random() / 2.0);
                    retry = (retry * 2).min(self.options.interval);
                }
            }
        }
    }
}

#[cfg(feature = "metrics")]
impl Janitor {
    /// From a sample, which is cheap at any size. An error here is one of a moment, and the next pass tells.
    async fn observe_records(&self) {
        let Ok(mut conn) = self.pool.acquire().await else { return };
        let Ok(stats) = crate::operator::stats(&mut conn, false).await else { return };
        let mut by_state = std::collections::BTreeMap::from(crate::operator::STATES.map(|state| (state.to_owned(), 0)));
        for group in stats.groups {
            *by_state.entry(group.state).or_default() += group.records;
        }
        crate::observe::records(by_state);
    }
}

/// Whether the oldest expired record gets older from pass to pass.
#[derive(Debug, Default)]
struct Backlog {
    oldest: Option<Duration>,
    grown: u32,
}

impl Backlog {
    fn grows(&mut self, swept: &Swept) -> bool {
        let before = std::mem::replace(&mut self.oldest, swept.oldest_after);
        self.grown = if swept.oldest_after > before { self.grown + 1 } else { 0 };
        self.grown >= GROWING
    }
}

/// 57014: a `statement_timeout`. 55P03: a `lock_timeout`.
fn is_timeout(error: &Error) -> bool {
    match error {
        Error::Database(error) => matches!(sqlstate(error).as_deref(), Some("57014" | "55P03")),
        _ => false,
    }
}

/// From 0 to 1; without randomness, janitors that start together sweep together, which does no harm.
fn random() -> f64 {
    f64::from(getrandom::u32().unwrap_or_default()) / f64::from(u32::MAX)
}

/// A future that is asked again after it was ready, which most do not stand.
pub(super) struct Shutdown<'a, F> {
    future: Option<Pin<&'a mut F>>,
}

impl<'a, F> Shutdown<'a, F> {
    pub(super) fn new(future: Pin<&'a mut F>) -> Self {
        Self { future: Some(future) }
    }
}

impl<F: Future<Output = ()>> Future for Shutdown<'_, F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(future) = &mut self.future {
            if future.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            self.future = None;
        }
        Poll::Ready(())
    }
}

/// The outcome of `other`, or `None` where `shutdown` is ready first.
pub(super) async fn unless<F: Future>(
    shutdown: &mut (impl Future<Output = ()> + Unpin),
    other: F,
) -> Option<F::Output> {
    let mut other = pin!(other);
    poll_fn(|context| match Pin::new(&mut *shutdown).poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => other.as_mut().poll(context).map(Some),
    })
    .await
}

pub(super) async fn is_ready(shutdown: &mut (impl Future<Output = ()> + Unpin)) -> bool {
    unless(shutdown, std::future::ready(())).await.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backlog_grows_when_it_is_older_three_times_in_a_row() {
        let mut backlog = Backlog::default();
        let after = |seconds: u64| Swept { oldest_after: Some(Duration::from_secs(seconds)), ..Swept::default() };
        let grown: Vec<bool> = [1, 2, 3, 4, 1, 2, 3, 4].map(|seconds| backlog.grows(&after(seconds))).into();
        assert_eq!(grown, [false, false, true, true, false, false, false, true]);
        assert!(!backlog.grows(&Swept::default()), "nothing is due");
    }
}
