//! The service: admit a request, run it in a task of its own, answer.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response, header};
use tokio::time::timeout;
use tower_service::Service;
use tracing::Instrument as _;

use super::body::Body;
use super::denied::Denied;
use super::rejection::{Misconfigured, Rejection};
use super::replay::IDEMPOTENCY_REPLAYED;
use super::request::{Admission, Refusal, Ticket, admit};
use super::settings::{Mode, Settings};
use super::{lease, transaction};
use crate::limits::in_flight_within;
use crate::{BoxError, Error, InFlight, observe};

/// What [`IdempotencyLayer`](super::IdempotencyLayer) makes of a service.
#[derive(Clone)]
pub struct IdempotencyService<S> {
    pub(super) inner: S,
    pub(super) settings: Arc<Settings>,
}

/// How a run ended without a response of the handler's.
pub(super) enum Ended<E> {
    Rejected(Rejection),
    /// The inner service's own error.
    Failed(E),
    Panicked(Box<dyn Any + Send>),
}

impl<E> From<Rejection> for Ended<E> {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected(rejection)
    }
}

impl<E> From<Misconfigured> for Ended<E> {
    fn from(misconfigured: Misconfigured) -> Self {
        Self::Rejected(misconfigured.into())
    }
}

impl<E> From<Error> for Ended<E> {
    fn from(error: Error) -> Self {
        Self::Rejected(Rejection::of(error))
    }
}

impl<S, B, R> Service<Request<B>> for IdempotencyService<S>
where
    S: Service<Request<Body<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    R: http_body::Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<Body<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that was polled ready is the one to call.
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        let settings = self.settings.clone();
        Box::pin(async move {
            let (ticket, request) = match admit(&settings, request).await {
                Ok(Admission::Admitted { ticket, request }) => (ticket, request),
                Ok(Admission::Passed(request)) => return Ok(inner.call(request).await?.map(Body::untouched)),
                Err(Refusal::Rejected(rejection)) => return Ok(rejected(&settings, rejection)),
                Err(Refusal::Denied(Denied(response))) => return Ok(response.map(|body| Body::whole(body, None))),
            };
            let in_flight = match pass(&settings, ticket.as_ref()).await {
                Ok(in_flight) => in_flight,
                Err(error) => return Ok(rejected(&settings, Rejection::of(error))),
            };
            let Some(running) = settings.runs.begin(settings.max_runs) else {
                return Ok(rejected(&settings, Rejection::Overloaded { limit: settings.max_runs }));
            };
            // Detached: when the client hangs up, this future is dropped, and the run goes on to its end.
            let run = tokio::spawn({
                let settings = settings.clone();
                async move {
                    let ended = run(&settings, ticket, in_flight, request, inner).await;
                    drop(running);
                    ended
                }
                .in_current_span()
            });
            match run.await {
                Ok(Ok(response)) => Ok(response),
                Ok(Err(Ended::Rejected(rejection))) => Ok(rejected(&settings, rejection)),
                Ok(Err(Ended::Failed(error))) => Err(error),
                // On the connection's task, where it would have been without the layer.
                Ok(Err(Ended::Panicked(panic))) => resume_unwind(panic),
                // The runtime is shutting down, or the layer itself has panicked.
                Err(error) => Ok(rejected(&settings, Rejection::of(Error::Database(sqlx::Error::Io(error.into()))))),
            }
        })
    }
}

/// Lets through what is no duplicate of a request that this process performs. Gives what is left of the wait.
async fn pass(settings: &Settings, ticket: Option<&Ticket>) -> Result<InFlight, Error> {
    in_flight_within(Some(settings.in_flight), settings.retention)?;
    let Some(ticket) = ticket else { return Ok(settings.in_flight) };
    let passed = settings.in_flight_here.pass(ticket, settings.in_flight).await;
    if let Err(error) = &passed {
        observe::failure(settings.mode.of_record(), ticket.key.operation(), error);
    }
    passed
}

async fn run<S, B, R>(
    settings: &Settings,
    ticket: Option<Ticket>,
    in_flight: InFlight,
    mut request: Request<Body<B>>,
    mut inner: S,
) -> Result<Response<Body<R>>, Ended<S::Error>>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    R: http_body::Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    if let Some(ticket) = &ticket {
        request.extensions_mut().insert(ticket.key.clone());
    }
    let handle = |request| {
        let answering = inner.call(request);
        async {
            let mut response = answering.await?;
            // A handler may pass on what another service has replayed to it. Here it is the first response.
            response.headers_mut().remove(IDEMPOTENCY_REPLAYED);
            Ok(response)
        }
    };
    match (settings.mode, &ticket) {
        (Mode::Transactional, Some(ticket)) => transaction::run(settings, ticket, in_flight, request, handle).await,
        (Mode::Transactional, None) => transaction::run_unprotected(settings, request, handle).await,
        (Mode::Leased(leasing), Some(ticket)) => {
            lease::run(settings, leasing, ticket, in_flight, request, handle).await
        }
        (Mode::Leased(_), None) => Ok(handled(settings, request, handle).await?.map(Body::untouched)),
    }
}

/// Calls the handler, for as long as it may take. After that it is dropped, and with it what it has not given back.
pub(super) async fn handled<B, R, E, F>(
    settings: &Settings,
    request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> Result<Response<R>, Ended<E>>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    let limit = settings.run_timeout;
    match timeout(limit, caught(async || handle(request).await)).await {
        Ok(answered) => answered,
        Err(_) => Err(Rejection::TimedOut { limit }.into()),
    }
}

/// Calls what is the handler's, and takes its panic as one way to end: the key is to be freed then too.
pub(super) async fn caught<T, E>(handle: impl AsyncFnOnce() -> Result<T, E>) -> Result<T, Ended<E>> {
    let mut handling = pin!(handle());
    // Nothing of the handler's is looked at after a panic but what the handler lent out, and that is rolled back.
    let polled = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| handling.as_mut().poll(context))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(ended)) => Poll::Ready(ended.map_err(Ended::Failed)),
        Err(panic) => Poll::Ready(Err(Ended::Panicked(panic))),
    });
    polled.await
}

/// The response of a rejection, with the rejection in its extensions.
fn rejected<R>(settings: &Settings, rejection: Rejection) -> Response<Body<R>> {
    match &rejection {
        Rejection::Unavailable(error) => {
            tracing::warn!(
                error = &**error as &dyn std::error::Error,
                "a request could not be made idempotent, and was refused"
            );
        }
        Rejection::Misconfigured(error) => {
            tracing::error!(
                error = &**error as &dyn std::error::Error,
                "a request met a mistake in the service's set-up"
            );
        }
        Rejection::TimedOut { limit } => {
            tracing::warn!(?limit, "a handler ran into the layer's time-out, and was dropped");
        }
        Rejection::Indeterminate { token } | Rejection::Exhausted { token, .. } => {
            tracing::warn!(token, "a request met an operation that waits for an operator");
        }
        _ => {}
    }
    let mut response = (settings.rejection)(&rejection).map(|body| Body::whole(body, None));
    if let Some(link) = &settings.documentation {
        response.headers_mut().append(header::LINK, link.clone());
    }
    response.extensions_mut().insert(rejection);
    response
}
