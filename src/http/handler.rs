//! The call of the handler, bounded in time and with its panics caught.

use std::any::Any;
use std::future::{Future as _, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

use http::{Request, Response};
use tokio::time::timeout;

use super::body::LayerBody;
use super::misconfigured::Misconfigured;
use super::rejection::Rejection;
use super::settings::Settings;
use crate::Error;

/// Why a run has no response of the handler.
pub(super) enum RunError<E> {
    Rejected(Rejection),
    /// The handler returned an error.
    Failed(E),
    Panicked(Box<dyn Any + Send>),
}

impl<E> From<Rejection> for RunError<E> {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected(rejection)
    }
}

impl<E> From<Misconfigured> for RunError<E> {
    fn from(misconfigured: Misconfigured) -> Self {
        Self::Rejected(misconfigured.into())
    }
}

impl<E> From<Error> for RunError<E> {
    fn from(error: Error) -> Self {
        Self::Rejected(Rejection::of(error))
    }
}

/// Calls the handler and drops it, with everything that it has not given back, if it takes too long.
pub(super) async fn handled<B, R, E>(
    settings: &Settings,
    request: Request<LayerBody<B>>,
    handle: impl AsyncFnOnce(Request<LayerBody<B>>) -> Result<Response<R>, E>,
) -> Result<Response<R>, RunError<E>> {
    let limit = settings.run_timeout;
    match timeout(limit, caught(async || handle(request).await)).await {
        Ok(answered) => answered,
        Err(_) => Err(Rejection::TimedOut { limit }.into()),
    }
}

/// Runs code of the handler and returns its panic as an error, because a panic must free the key, too.
pub(super) async fn caught<T, E>(code: impl AsyncFnOnce() -> Result<T, E>) -> Result<T, RunError<E>> {
    let mut running = pin!(code());
    // After a panic the layer looks at nothing of the handler except the transaction, which it rolls back.
    let polled = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(context))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(result)) => Poll::Ready(result.map_err(RunError::Failed)),
        Err(panic) => Poll::Ready(Err(RunError::Panicked(panic))),
    });
    polled.await
}
