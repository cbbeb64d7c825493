//! The runs under way, which no connection waits for when its client has hung up.

use std::sync::Arc;

use tokio::sync::watch;

/// Counts the runs of a layer. Keep one from [`IdempotencyLayer::runs`](super::IdempotencyLayer::runs), and wait for it at
/// the end of a graceful shutdown.
///
/// ```
/// # use pg_idempotency::http::Runs;
/// let runs = Runs::default(); // for several layers: `.with_runs(&runs)` on each
/// assert_eq!(runs.count(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct Runs {
    running: Arc<watch::Sender<usize>>,
}

/// One run, for as long as this lives.
pub(super) struct Running {
    running: Arc<watch::Sender<usize>>,
}

impl Default for Runs {
    fn default() -> Self {
        Self { running: Arc::new(watch::Sender::new(0)) }
    }
}

impl Runs {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.running.borrow()
    }

    /// Waits until there is none. Stop taking requests first; and put a time-out around it, shorter than the one after
    /// which your platform kills: what is under way then is rolled back, or its lease lapses.
    pub async fn finished(&self) {
        // The sender is in `self`, so the channel stays open.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// Counts one more, unless there are `most` already.
    pub(super) fn begin(&self, most: usize) -> Option<Running> {
        // Compared and counted under one lock: two requests never take the last place both.
        let begun = self.running.send_if_modified(|running| {
            let fits = *running < most;
            *running += usize::from(fits);
            fits
        });
        begun.then(|| Running { running: self.running.clone() })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.running.send_modify(|running| *running -= 1);
    }
}
