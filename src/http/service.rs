//! The service: admit a request, run it in a task of its own, answer.

use std::fmt;
use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response, header};
use tower_service::Service;
use tracing::Instrument as _;

use super::body::LayerBody;
use super::handler::{RunError, handled};
use super::leased::Leased;
use super::rejection::Rejection;
use super::replay::IDEMPOTENCY_REPLAYED;
use super::request::{Admission, Refusal, Ticket, admit};
use super::settings::{Denied, Settings};
use super::transactional::Transactional;
use crate::limits::in_flight_within;
use crate::{BoxError, Error, InFlight, observe};

/// The service that [`IdempotencyLayer`](super::IdempotencyLayer) makes of an inner service.
#[derive(Clone)]
pub struct IdempotencyService<S> {
    inner: S,
    settings: Arc<Settings>,
    protection: Protection,
}

/// How the layer protects an operation from a second run.
#[derive(Clone, Copy)]
pub(super) enum Protection {
    Transactional(Transactional),
    Leased(Leased),
}

impl<S> IdempotencyService<S> {
    pub(super) fn new(inner: S, settings: Settings, protection: Protection) -> Self {
        Self { inner, settings: Arc::new(settings), protection }
    }
}

type Answered<R, E> = Result<Response<LayerBody<R>>, E>;

/// The future response of an [`IdempotencyService`]. A run that has begun continues after this future is dropped.
#[must_use = "a future does nothing until it is awaited"]
pub struct ResponseFuture<R, E> {
    answer: Pin<Box<dyn Future<Output = Answered<R, E>> + Send>>,
}

impl<R, E> Future for ResponseFuture<R, E> {
    type Output = Answered<R, E>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.answer.as_mut().poll(context)
    }
}

impl<R, E> fmt::Debug for ResponseFuture<R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<S, B, R> Service<Request<B>> for IdempotencyService<S>
where
    S: Service<Request<LayerBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<LayerBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<R, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Only the instance that was polled may be called.
        let unpolled = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, unpolled);
        let answer = answer(self.settings.clone(), self.protection, request, inner);
        ResponseFuture { answer: Box::pin(answer) }
    }
}

async fn answer<S, B, R>(
    settings: Arc<Settings>,
    protection: Protection,
    request: Request<B>,
    mut inner: S,
) -> Answered<R, S::Error>
where
    S: Service<Request<LayerBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let (ticket, request) = match admit(&settings, request).await {
        Ok(Admission::Admitted { ticket, request }) => (ticket, request),
        Ok(Admission::NotCovered(request)) => return Ok(inner.call(request).await?.map(LayerBody::untouched)),
        Err(Refusal::Rejected(rejection)) => return Ok(rejected(&settings, rejection)),
        Err(Refusal::Denied(Denied(response))) => return Ok(response.map(|body| LayerBody::whole(body, None))),
    };
    let in_flight = match until_free(&settings, protection, ticket.as_ref()).await {
        Ok(in_flight) => in_flight,
        Err(error) => return Ok(rejected(&settings, Rejection::of(error))),
    };
    let Some(counted) = settings.runs.begin(settings.max_runs) else {
        return Ok(rejected(&settings, Rejection::Overloaded { limit: settings.max_runs }));
    };
    // Detached: when the client hangs up, the server drops this future, and the run continues to its end.
    let run = tokio::spawn({
        let settings = settings.clone();
        async move {
            let ran = protection.run(&settings, ticket, in_flight, request, inner).await;
            drop(counted);
            ran
        }
        .in_current_span()
    });
    match run.await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(RunError::Rejected(rejection))) => Ok(rejected(&settings, rejection)),
        Ok(Err(RunError::Failed(error))) => Err(error),
        // The panic goes on in the connection's task, where it would be without the layer.
        Ok(Err(RunError::Panicked(panic))) => resume_unwind(panic),
        // The runtime is shutting down, or the layer itself has panicked.
        Err(error) => Ok(rejected(&settings, Rejection::of(Error::Database(sqlx::Error::Io(error.into()))))),
    }
}

/// Rejects or delays duplicates of requests that this process is already performing. Returns the rest of the wait.
async fn until_free(settings: &Settings, protection: Protection, ticket: Option<&Ticket>) -> Result<InFlight, Error> {
    in_flight_within(Some(settings.in_flight), settings.retention)?;
    let Some(Ticket { key, fingerprint }) = ticket else { return Ok(settings.in_flight) };
    let free = settings.local.until_free(key, *fingerprint, settings.in_flight).await;
    free.inspect_err(|error| observe::failure(protection.mode(), key.operation(), error))
}

impl Protection {
    /// The mode of the records.
    fn mode(self) -> crate::Mode {
        match self {
            Self::Transactional(_) => crate::Mode::Transaction,
            Self::Leased(leased) => leased.leasing.mode(),
        }
    }

    async fn run<S, B, R>(
        self,
        settings: &Settings,
        ticket: Option<Ticket>,
        in_flight: InFlight,
        mut request: Request<LayerBody<B>>,
        mut inner: S,
    ) -> Result<Response<LayerBody<R>>, RunError<S::Error>>
    where
        S: Service<Request<LayerBody<B>>, Response = Response<R>>,
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
    {
        if let Some(ticket) = &ticket {
            request.extensions_mut().insert(ticket.key.clone());
        }
        let handle = async |request| {
            let mut response = inner.call(request).await?;
            // A handler may pass on a response that another service has replayed. Here it is a first response.
            response.headers_mut().remove(IDEMPOTENCY_REPLAYED);
            Ok(response)
        };
        match (self, &ticket) {
            (Self::Transactional(mode), Some(ticket)) => mode.run(settings, ticket, in_flight, request, handle).await,
            (Self::Transactional(mode), None) => mode.run_unprotected(settings, request, handle).await,
            (Self::Leased(mode), Some(ticket)) => mode.run(settings, ticket, in_flight, request, handle).await,
            (Self::Leased(_), None) => Ok(handled(settings, request, handle).await?.map(LayerBody::untouched)),
        }
    }
}

/// The response for a rejection, with the rejection in its extensions.
fn rejected<R>(settings: &Settings, rejection: Rejection) -> Response<LayerBody<R>> {
    match &rejection {
        Rejection::Unavailable(error) => {
            let error = &**error as &dyn std::error::Error;
            tracing::warn!(error, "a request could not be made idempotent, and was refused");
        }
        Rejection::Misconfigured(error) => {
            let error = &**error as &dyn std::error::Error;
            tracing::error!(error, "a request met a mistake in the service's set-up");
        }
        Rejection::TimedOut { limit } => {
            tracing::warn!(?limit, "a handler ran into the layer's time-out, and was dropped");
        }
        Rejection::Indeterminate { token } | Rejection::Exhausted { token, .. } => {
            tracing::warn!(token, "a request met an operation that waits for an operator");
        }
        _ => {}
    }
    let mut response = (settings.rejection)(&rejection).map(|body| LayerBody::whole(body, None));
    if let Some(link) = &settings.documentation {
        response.headers_mut().append(header::LINK, link.clone());
    }
    response.extensions_mut().insert(rejection);
    response
}
