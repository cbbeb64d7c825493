//! Work in the background: the loop that repeats a pass, its shutdown, and panics of the service's code.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::sleep;

use crate::Error;

/// The pause of a loop after its first error. It doubles with each further error.
const FIRST_RETRY: Duration = Duration::from_secs(1);

pub(crate) enum Next {
    /// At once, because there may be more to do.
    AtOnce,
    AfterInterval {
        less: Duration,
    },
    /// After the pause for an error, which the pass has logged.
    AfterError,
}

impl Next {
    /// After the whole interval, because there is nothing to do.
    pub(crate) const LATER: Self = Self::AfterInterval { less: Duration::ZERO };
}

/// The passes of a loop until its shutdown. The first pass begins after an interval, so that processes that start
/// together do not search together.
///
/// An error or a panic of a pass is logged, and the loop goes on: at first after a second, and after twice the time
/// with each error, up to the interval.
//
// Not a function that takes the pass as an asynchronous closure: the future of such a loop would not be `Send`.
pub(crate) struct Passes<'l> {
    what: &'static str,
    operation: Option<&'l str>,
    interval: Duration,
    pub(crate) shutdown: Shutdown<'l>,
    retry: Duration,
    rest: Duration,
}

impl<'l> Passes<'l> {
    pub(crate) fn of(
        what: &'static str,
        operation: Option<&'l str>,
        interval: Duration,
        shutdown: Pin<&'l mut (dyn Future<Output = ()> + Send)>,
    ) -> Self {
        let (shutdown, retry, rest) = (Shutdown::When(shutdown), FIRST_RETRY, jittered(interval));
        Self { what, operation, interval, shutdown, retry, rest }
    }

    pub(crate) async fn next(&mut self) -> bool {
        unless(&mut self.shutdown, sleep(self.rest)).await.is_some()
    }

    /// Notes how the pass has [ended](caught).
    pub(crate) fn ended(&mut self, pass: Result<Result<Next, Error>, Panic>) {
        let (operation, what) = (self.operation, self.what);
        let next = match pass {
            Ok(Ok(next)) => next,
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(operation, error, "{what} failed and is tried again");
                Next::AfterError
            }
            Err(_) => {
                tracing::error!(operation, "{what} panicked and is tried again");
                Next::AfterError
            }
        };
        self.rest = match next {
            Next::AtOnce => Duration::ZERO,
            Next::AfterInterval { less } => jittered(self.interval).saturating_sub(less),
            Next::AfterError => jittered(self.retry),
        };
        self.retry = match next {
            Next::AfterError => (self.retry * 2).min(self.interval.max(FIRST_RETRY)),
            Next::AtOnce | Next::AfterInterval { .. } => FIRST_RETRY,
        };
    }
}

/// The end of a loop, a search or a sweep. Unlike most futures, it may be polled again after it was ready.
pub(crate) enum Shutdown<'a> {
    Never,
    When(Pin<&'a mut (dyn Future<Output = ()> + Send)>),
    Now,
}

impl Future for Shutdown<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let polled = match &mut *self {
            Self::Never => Poll::Pending,
            Self::When(future) => future.as_mut().poll(context),
            Self::Now => Poll::Ready(()),
        };
        if polled.is_ready() {
            *self = Self::Now;
        }
        polled
    }
}

impl Shutdown<'_> {
    pub(crate) async fn is_ready(&mut self) -> bool {
        unless(self, std::future::ready(())).await.is_none()
    }

    /// Is ready after the limit, or `grace` after the shutdown if that is earlier.
    pub(crate) async fn or_after(&mut self, limit: Duration, grace: Duration) {
        let mut limit = pin!(sleep(limit));
        if unless(self, limit.as_mut()).await.is_none() {
            unless(&mut limit, sleep(grace)).await;
        }
    }
}

/// The outcome of `other`; `None` if `end` is ready first. This polls `end` first.
pub(crate) async fn unless<F: Future>(end: &mut (impl Future<Output = ()> + Unpin), other: F) -> Option<F::Output> {
    let mut other = pin!(other);
    poll_fn(|context| match Pin::new(&mut *end).poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => other.as_mut().poll(context).map(Some),
    })
    .await
}

pub(crate) type Panic = Box<dyn Any + Send>;

/// Runs code of the service, and returns its panic as an error. The code is dropped before this returns.
///
/// After a panic, the caller must not read data that the code may have left half changed.
pub(crate) fn caught<T>(code: impl Future<Output = T>) -> impl Future<Output = Result<T, Panic>> {
    // Boxed before the first await, for the reason in session/waits.rs.
    let mut code = Box::pin(code);
    async move {
        poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| code.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        })
        .await
    }
}

/// A random time between half of the pause and the whole pause, so that callers that tried together do not try again
/// together.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause.mul_f64(0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0)
}

/// Rotates by a random number of places, so that processes with the same list begin at different places.
pub(crate) fn begin_anywhere<T>(found: &mut [T]) {
    if !found.is_empty() {
        let first = getrandom::u32().unwrap_or_default() as usize % found.len();
        found.rotate_left(first);
    }
}
