//! The runs in progress. No connection waits for a run whose client has hung up.

use std::sync::Arc;

use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, timeout_at};

/// Counts the runs of a layer. Take it from [`IdempotencyLayer::runs`](super::IdempotencyLayer::runs), and wait for
/// [`finished`](Self::finished) at the end of a graceful shutdown.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    count: Arc<watch::Sender<usize>>,
    /// Held by the request that gets the next place. The others wait for this lock, which is fair.
    next: Arc<Mutex<()>>,
}

/// One run, for as long as this value lives.
pub(super) struct CountedRun(Runs);

impl Runs {
    /// The number of runs in progress.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.count.borrow()
    }

    /// Waits until no run is in progress. Stop accepting requests first. Put a time-out around this, shorter than the
    /// one after which your platform kills the process: a run that is cut off is rolled back, or its lease lapses.
    pub async fn finished(&self) {
        // The sender is in `self`, so the channel stays open.
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Counts one more run, unless there are `most` already.
    fn begin(&self, most: usize) -> Option<CountedRun> {
        // The channel compares and counts under one lock, so two requests never both take the last place.
        let begun = self.count.send_if_modified(|count| {
            let fits = *count < most;
            *count += usize::from(fits);
            fits
        });
        begun.then(|| CountedRun(self.clone()))
    }

    /// Waits for a place until the deadline, and counts one more run. The requests get their places in the order in which
    /// they ask.
    pub(super) async fn begin_until(&self, most: usize, deadline: Instant) -> Option<CountedRun> {
        let waiting = async {
            let _next = self.next.lock().await;
            // Subscribed before the try, so that a run that ends in between is seen.
            let mut ended = self.count.subscribe();
            loop {
                if let Some(counted) = self.begin(most) {
                    return Some(counted);
                }
                ended.changed().await.ok()?;
            }
        };
        timeout_at(deadline, waiting).await.ok()?
    }
}

impl Drop for CountedRun {
    fn drop(&mut self) {
        self.0.count.send_modify(|count| *count -= 1);
    }
}
