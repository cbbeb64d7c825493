//! A place to stop inside `perform`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Long past anything that works, short enough for a person: a test that hangs fails by it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Stops inside `perform`: the operation [`pass`](Self::pass)es, the test waits until it is [`reached`](Self::reached), does
/// what should happen in that moment, and [`open`](Self::open)s.
///
/// Clones are the same gate. Each `open` lets one through, also one that comes later, and each `reached` is for one arrival.
///
/// ```
/// # use pg_idempotency::testing::Gate;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let gate = Gate::new();
/// let operation = tokio::spawn({
///     let gate = gate.clone();
///     async move {
///         gate.pass().await; // in a real test: in the middle of `perform`
///         "done"
///     }
/// });
/// gate.reached().await;
/// assert!(!operation.is_finished());
/// gate.open();
/// assert_eq!(operation.await.expect("no panic"), "done");
/// # }
/// ```
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

    /// Says that the gate is reached, and waits until it is opened.
    ///
    /// # Cancellation
    ///
    /// A future that is dropped here has been counted as reaching the gate, and leaves what was opened to others.
    pub async fn pass(&self) {
        self.reached.add_permits(1);
        take(&self.opened).await;
    }

    /// Waits until somebody is at the gate.
    ///
    /// # Panics
    ///
    /// After [`PATIENCE`].
    pub async fn reached(&self) {
        if timeout(PATIENCE, take(&self.reached)).await.is_err() {
            panic!("nobody reached the gate within {PATIENCE:?}");
        }
    }

    /// Lets one through.
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
    // Never closed, so it is always a permit.
    if let Ok(permit) = semaphore.acquire().await {
        permit.forget();
    }
}
