//! The call of the handler, bounded in time and with its panics caught.

use std::future::{Future, poll_fn};
use std::time::Duration;

use http::request::Parts;
use http::{Extensions, Method, Request, Response};
use tokio::time::timeout;
use tower_service::Service;

use super::body::{LayerBody, ResponseBody};
use super::rejection::{Denied, Rejection};
use super::replay::IDEMPOTENT_REPLAYED;
use crate::Error;
use crate::caught::{Panic, caught};

/// Why a request has no response of its handler.
pub(super) enum NoResponse<E> {
    Rejected(Rejection),
    /// A function of the service refused the request with a response of its own.
    Denied(Denied),
    /// The handler returned an error.
    Failed(E),
    Panicked(Panic),
}

impl<E, R: Into<Rejection>> From<R> for NoResponse<E> {
    fn from(rejection: R) -> Self {
        Self::Rejected(rejection.into())
    }
}

impl<E> From<Error> for NoResponse<E> {
    fn from(error: Error) -> Self {
        Self::Rejected(Rejection::of(error))
    }
}

/// The reply to a request that `H` handles.
pub(super) type Reply<H> = Result<Response<LayerBody<<H as Handler>::Body>>, NoResponse<<H as Handler>::Error>>;

/// A request together with the service that handles it.
pub(super) trait Handler: Send + 'static {
    type Body: ResponseBody + Send + 'static;
    type Error: Send + 'static;

    fn extensions_mut(&mut self) -> &mut Extensions;

    /// Whether the response has no body, although it may announce the length of one.
    fn is_head(&self) -> bool;

    /// The request without its body, for a handler that is not called.
    fn into_parts(self) -> Parts;

    /// Calls the handler. If it takes longer than `limit`, drops it with everything that it has not given back.
    fn call(
        self,
        limit: Duration,
    ) -> impl Future<Output = Result<Response<Self::Body>, NoResponse<Self::Error>>> + Send;
}

pub(super) struct ServiceCall<S, B> {
    pub(super) service: S,
    pub(super) request: Request<B>,
}

impl<S, B, R> Handler for ServiceCall<S, B>
where
    S: Service<Request<B>, Response = Response<R>, Error: Send, Future: Send> + Send + 'static,
    B: Send + 'static,
    R: ResponseBody + Send + 'static,
{
    type Body = R;
    type Error = S::Error;

    fn extensions_mut(&mut self) -> &mut Extensions {
        self.request.extensions_mut()
    }

    fn is_head(&self) -> bool {
        self.request.method() == Method::HEAD
    }

    fn into_parts(self) -> Parts {
        self.request.into_parts().0
    }

    async fn call(mut self, limit: Duration) -> Result<Response<R>, NoResponse<S::Error>> {
        let answering = caught(async {
            // That of a resumed request has not been polled. Another one is still ready.
            poll_fn(|context| self.service.poll_ready(context)).await?;
            self.service.call(self.request).await
        });
        let answered = timeout(limit, answering).await.map_err(|_| Rejection::TimedOut { limit })?;
        // A panic must free the key, too.
        let answered = answered.map_err(NoResponse::Panicked)?;
        let mut response = answered.map_err(NoResponse::Failed)?;
        // A handler may pass on a response that another service has replayed. Here it is a first response.
        response.headers_mut().remove(IDEMPOTENT_REPLAYED);
        Ok(response)
    }
}
