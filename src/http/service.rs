//! The service: admit a request, run it in a task of its own, answer.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use tokio::time::Instant;
use tower_service::Service;
use tracing::Instrument as _;

use super::body::LayerBody;
use super::handler::{Answer, Handler, ServiceCall, Unanswered};
use super::leased::Leased;
use super::local_in_flight::Free;
use super::rejection::Rejection;
use super::request::{Admission, Ticket, admit};
use super::settings::{Denied, Settings};
use super::transactional::Transactional;
use crate::{BoxError, Mode, observe};

/// The service that [`IdempotencyLayer`](super::IdempotencyLayer) makes of an inner service.
#[derive(Clone)]
pub struct IdempotencyService<S> {
    pub(super) inner: S,
    pub(super) settings: Arc<Settings>,
    pub(super) protection: Protection,
}

/// How the layer protects an operation from a second run.
#[derive(Clone, Copy)]
pub(super) enum Protection {
    Transactional(Transactional),
    Leased(Leased),
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
        let mut service = std::mem::replace(&mut self.inner, unpolled);
        let (settings, protection) = (self.settings.clone(), self.protection);
        let answer = async move {
            let answer = match admit(&settings, request).await {
                Ok(Admission::NotCovered(request)) => {
                    return service.call(request).await.map(|response| response.map(LayerBody::untouched));
                }
                Ok(Admission::Covered { ticket, request }) => {
                    protection.run_in_task(&settings, ticket, ServiceCall { service, request }).await
                }
                Err(refused) => Err(refused),
            };
            match answer {
                Ok(response) => Ok(response),
                Err(Unanswered::Rejected(rejection)) => Ok(rejected(&settings, rejection)),
                Err(Unanswered::Denied(Denied(response))) => Ok(response.map(LayerBody::whole)),
                Err(Unanswered::Failed(error)) => Err(error),
                // The panic goes on in the connection's task, where it would be without the layer.
                Err(Unanswered::Panicked(panic)) => resume_unwind(panic),
            }
        };
        ResponseFuture { answer: Box::pin(answer) }
    }
}

impl Protection {
    /// The mode of the records.
    fn mode(self) -> Mode {
        match self {
            Self::Transactional(_) => Mode::Transaction,
            Self::Leased(leased) => leased.leasing.mode(),
        }
    }

    /// Runs the request in a task of its own: when the client hangs up, the run continues to its end.
    async fn run_in_task<H: Handler>(
        self,
        settings: &Arc<Settings>,
        mut ticket: Option<Ticket>,
        handler: H,
    ) -> Answer<H> {
        let limit = settings.max_runs;
        let mut counted = None;
        if let Some(ticket) = &mut ticket {
            let deadline = Instant::now() + ticket.wait;
            let free = settings.local.until_free(&ticket.key, ticket.fingerprint, deadline).await;
            match free.inspect_err(|error| observe::failure(self.mode(), ticket.key.operation(), error))? {
                Free::AtOnce => {}
                // All duplicates of the first request are here at the same moment.
                Free::AfterAWait => counted = settings.runs.begin_until(limit, deadline).await,
            }
            ticket.wait = deadline.saturating_duration_since(Instant::now());
        }
        let counted = counted.or_else(|| settings.runs.begin(limit)).ok_or(Rejection::Overloaded { limit })?;
        let settings = settings.clone();
        let run = async move {
            let answer = self.run(&settings, ticket, handler).await;
            drop(counted);
            answer
        };
        // The task fails if the runtime is shutting down, or the layer itself has panicked.
        let ended = tokio::spawn(run.in_current_span()).await;
        ended.unwrap_or_else(|_| Err(crate::Error::Unanswered.into()))
    }

    async fn run<H: Handler>(self, settings: &Settings, ticket: Option<Ticket>, mut handler: H) -> Answer<H> {
        if let Some(ticket) = &ticket {
            handler.extensions_mut().insert(ticket.key.clone());
        }
        let answer = match (self, &ticket) {
            (Self::Transactional(mode), ticket) => mode.run(settings, ticket.as_ref(), handler).await,
            (Self::Leased(mode), Some(ticket)) => mode.run(settings, ticket, handler).await,
            (Self::Leased(_), None) => Ok(handler.call(settings.run_timeout).await?.map(LayerBody::untouched)),
        };
        if let (Err(Unanswered::Rejected(rejection)), Some(ticket)) = (&answer, &ticket) {
            warn_of_unsettled(ticket.key.operation(), rejection);
        }
        answer
    }
}

fn warn_of_unsettled(operation: &str, rejection: &Rejection) {
    let (token, steps) = match rejection {
        Rejection::Indeterminate { token, steps } => (token, &**steps),
        Rejection::Exhausted { token, .. } => (token, &[][..]),
        _ => return,
    };
    tracing::warn!(
        operation,
        token,
        steps = (!steps.is_empty()).then(|| tracing::field::debug(steps)),
        kind = rejection.kind(),
        "a request met an operation that waits for an operator"
    );
}

/// The response for a rejection, with the rejection in its extensions.
fn rejected<R>(settings: &Settings, rejection: Rejection) -> Response<LayerBody<R>> {
    match &rejection {
        Rejection::Unavailable(error) => {
            tracing::warn!(error = &**error as &dyn Error, "a request could not be made idempotent, and was refused");
        }
        Rejection::Misconfigured(error) => {
            tracing::error!(error = &**error as &dyn Error, "a request met a mistake in the service's set-up");
        }
        Rejection::TimedOut { limit } => {
            tracing::warn!(?limit, "a handler ran into the layer's time-out, and was dropped");
        }
        _ => {}
    }
    let mut response = (settings.rejection)(&rejection).map(LayerBody::whole);
    response.extensions_mut().insert(rejection);
    response
}
