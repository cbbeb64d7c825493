//! A point inside `perform` at which a test stops a call, and a future that is dropped at any of its polls.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

/// The longest wait: 30 seconds. A test that works is much faster, and a test that hangs fails after this time.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Stops a call inside `perform`. The operation calls [`pass`](Self::pass). The test waits until the gate is
/// [`reached`](Self::reached), does its work while the call is stopped, and [`open`](Self::open)s the gate.
///
/// Clones are the same gate. Each `open` lets one arrival through, even a later one, and each `reached` counts one
/// arrival.
#[derive(Clone, Debug)]
pub struct Gate {
    reached: Arc<Semaphore>,
    opened: Arc<Semaphore>,
}

impl Gate {
    /// A closed gate.
    #[must_use]
    pub fn new() -> Self {
        Self { reached: Arc::new(Semaphore::new(0)), opened: Arc::new(Semaphore::new(0)) }
    }

    /// Reaches the gate, and waits until it is opened.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped here, it still counts as an arrival. An `open` remains for another arrival.
    pub async fn pass(&self) {
        self.reached.add_permits(1);
        take(&self.opened).await;
    }

    /// Waits until a call reaches the gate.
    ///
    /// # Panics
    ///
    /// After [`PATIENCE`].
    pub async fn reached(&self) {
        if timeout(PATIENCE, take(&self.reached)).await.is_err() {
            panic!("no call reached the gate within {PATIENCE:?}");
        }
    }

    /// Lets one arrival through.
    pub fn open(&self) {
        self.opened.add_permits(1);
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

async fn take(semaphore: &Semaphore) {
    // The semaphore is never closed, so this is always a permit.
    if let Ok(permit) = semaphore.acquire().await {
        permit.forget();
    }
}

/// Polls a future at most `polls` times, then drops it. `None` means that it was dropped.
///
/// A client that hangs up, a `timeout` and a `select!` all drop a call at one of its polls. To cover every such point,
/// try 0, 1, 2 … polls until the call completes, and check each time that nothing is half done.
pub async fn cancel_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut polled = 0;
    poll_fn(move |context| {
        if polled == polls {
            return Poll::Ready(None);
        }
        polled += 1;
        let result = future.as_mut().poll(context).map(Some);
        // This was the last poll. A future that has not ended is dropped at once, without waiting for it to be
        // woken.
        if result.is_pending() && polled == polls {
            return Poll::Ready(None);
        }
        result
    })
    .await
}
