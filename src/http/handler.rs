//! The call of the handler, bounded in time and with its panics caught.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, Request, Response};
use tokio::time::timeout;
use tower_service::Service;

use super::body::LayerBody;
use super::rejection::{Misconfigured, Rejection};
use super::replay::IDEMPOTENCY_REPLAYED;
use super::settings::Denied;
use crate::{BoxError, Error};

/// Why a request has no response of its handler.
pub(super) enum Unanswered<E> {
    Rejected(Rejection),
    /// A function of the service refused the request with a response of its own.
    Denied(Denied),
    /// The handler returned an error.
    Failed(E),
    Panicked(Box<dyn Any + Send>),
}

impl<E> From<Rejection> for Unanswered<E> {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected(rejection)
    }
}

impl<E> From<Misconfigured> for Unanswered<E> {
    fn from(misconfigured: Misconfigured) -> Self {
        Self::Rejected(misconfigured.into())
    }
}

impl<E> From<Error> for Unanswered<E> {
    fn from(error: Error) -> Self {
        Self::Rejected(Rejection::of(error))
    }
}

/// A request together with the service that handles it.
pub(super) trait Handler {
    type Body: http_body::Body<Data = Bytes, Error: Into<BoxError>>;
    type Error;

    fn extensions_mut(&mut self) -> &mut Extensions;

    /// Calls the handler. If it takes longer than `limit`, drops it with everything that it has not given back.
    async fn call(self, limit: Duration) -> Result<Response<Self::Body>, Unanswered<Self::Error>>;
}

pub(super) struct ServiceCall<S, B> {
    pub(super) service: S,
    pub(super) request: Request<LayerBody<B>>,
}

impl<S, B, R> Handler for ServiceCall<S, B>
where
    S: Service<Request<LayerBody<B>>, Response = Response<R>>,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Body = R;
    type Error = S::Error;

    fn extensions_mut(&mut self) -> &mut Extensions {
        self.request.extensions_mut()
    }

    async fn call(mut self, limit: Duration) -> Result<Response<R>, Unanswered<S::Error>> {
        let answering = caught(async || self.service.call(self.request).await);
        let mut response = timeout(limit, answering).await.map_err(|_| Rejection::TimedOut { limit })??;
        // A handler may pass on a response that another service has replayed. Here it is a first response.
        response.headers_mut().remove(IDEMPOTENCY_REPLAYED);
        Ok(response)
    }
}

/// Runs code of the handler and returns its panic as an error, because a panic must free the key, too.
pub(super) async fn caught<T, E>(code: impl AsyncFnOnce() -> Result<T, E>) -> Result<T, Unanswered<E>> {
    let mut running = pin!(code());
    // After a panic the layer looks at nothing of the handler except the transaction, which it rolls back.
    let polled = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(context))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(result)) => Poll::Ready(result.map_err(Unanswered::Failed)),
        Err(panic) => Poll::Ready(Err(Unanswered::Panicked(panic))),
    });
    polled.await
}
