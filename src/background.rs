//! Work in the background: the loop that repeats a pass, its shutdown, and panics of the service's code.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::sleep;

use crate::Error;

/// The pause of a loop after its first error. The pause doubles with each further error.
const FIRST_RETRY: Duration = Duration::from_secs(1);

pub(crate) enum Next {
    /// The next pass begins at once, because there may be more to do.
    AtOnce,
    AfterInterval {
        less: Duration,
    },
    /// The next pass begins after the pause for an error. The failed pass has logged the error.
    AfterError,
}

impl Next {
    /// The next pass begins after the whole interval, because there is nothing to do.
    pub(crate) const LATER: Self = Self::AfterInterval { less: Duration::ZERO };
}

/// The passes of a loop until its shutdown. The first pass begins after a random time of at most one interval.
/// So processes that start together begin their passes at different times.
///
/// The loop logs an error or a panic of a pass, and continues after a pause. The first pause is a second. Each further
/// error doubles the pause, up to the interval.
//
// `Passes` is not a function that takes the pass as an asynchronous closure, because the future of such a function
// would not be `Send`.
pub(crate) struct Passes<'l> {
    what: &'static str,
    operation: Option<&'l str>,
    interval: Duration,
    pub(crate) shutdown: Shutdown<'l>,
    retry: Duration,
    pause: Duration,
}

impl<'l> Passes<'l> {
    pub(crate) fn of(
        what: &'static str,
        operation: Option<&'l str>,
        interval: Duration,
        shutdown: Pin<&'l mut (dyn Future<Output = ()> + Send)>,
    ) -> Self {
        let (shutdown, retry, pause) = (Shutdown::When(shutdown), FIRST_RETRY, jittered(interval));
        Self { what, operation, interval, shutdown, retry, pause }
    }

    pub(crate) async fn next(&mut self) -> bool {
        unless(&mut self.shutdown, sleep(self.pause)).await.is_some()
    }

    /// Notes the result that [`caught`] returned for the pass.
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
        self.pause = match next {
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

/// The shutdown of a loop, a search or a sweep. Unlike most futures, a `Shutdown` may be polled again after its
/// completion.
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

    /// Waits until `limit` after the call, or until `grace` after the shutdown, whichever is earlier.
    pub(crate) async fn or_after(&mut self, limit: Duration, grace: Duration) {
        let mut limit = pin!(sleep(limit));
        if unless(self, limit.as_mut()).await.is_none() {
            unless(&mut limit, sleep(grace)).await;
        }
    }
}

/// Returns the outcome of `other`, or `None` if `end` is ready first. Each poll of the function polls `end` first.
pub(crate) async fn unless<F: Future>(end: &mut (impl Future + Unpin), other: F) -> Option<F::Output> {
    let mut other = pin!(other);
    poll_fn(|context| match Pin::new(&mut *end).poll(context) {
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => other.as_mut().poll(context).map(Some),
    })
    .await
}

pub(crate) type Panic = Box<dyn Any + Send>;

/// Runs code of the service, and returns a panic of the code as an error. The code's future is dropped before `caught`
/// returns.
///
/// After a panic, the caller must not read data that the code may have left half changed.
pub(crate) fn caught<T>(code: impl Future<Output = T>) -> impl Future<Output = Result<T, Panic>> {
    // The code is boxed before the first await. The comment in `session/waits.rs` gives the reason.
    let mut code = Box::pin(code);
    async move {
        poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| code.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        })
        .await
    }
}

/// Returns a random time between half of the pause and the whole pause. Callers that pause at the same moment then try
/// again at different times.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause.mul_f64(0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0)
}

/// Rotates the list by a random number, so that processes with the same list begin with different elements.
pub(crate) fn begin_anywhere<T>(found: &mut [T]) {
    if !found.is_empty() {
        let first = getrandom::u32().unwrap_or_default() as usize % found.len();
        found.rotate_left(first);
    }
}
