//! The service: admit a request, run it in a task of its own, answer.

use std::error::Error;
use std::future::{Future, poll_fn};
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use tokio::sync::watch;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument as _;

use super::body::LayerBody;
use super::handler::{Handler, NoResponse, Reply, ServiceCall};
use super::key_header::{IDEMPOTENCY_KEY, only_line};
use super::layer::{IdempotencyLayer, LayerMode};
use super::leased;
use super::places::Patience;
use super::rejection::{Denied, Rejection};
use super::request::{Admission, Ticket, admit};
use super::transactional::Transactional;
use crate::{BoxError, observe};

/// The service that [`IdempotencyLayer`](super::IdempotencyLayer) makes of an inner service. A run that has begun
/// continues after the future of its response is dropped.
#[derive(Clone)]
pub struct IdempotencyService<S> {
    inner: S,
    layer: Arc<IdempotencyLayer>,
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService { inner, layer: Arc::new(self.clone()) }
    }
}

impl<S, B, R> Service<Request<B>> for IdempotencyService<S>
where
    S: Service<Request<LayerBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<LayerBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    /// Always ready: what the inner service may reserve for a request, such as a place of a limit, is taken once the
    /// body is there.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let mut service = self.inner.clone();
        let layer = self.layer.clone();
        let mut key =
            layer.key_from.is_none().then(|| only_line(request.headers(), &IDEMPOTENCY_KEY).cloned()).flatten();
        // No log of response headers may show it.
        key.iter_mut().for_each(|key| key.set_sensitive(true));
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let covered = layer.methods.contains(&parts.method);
            let operation = covered.then(|| layer.operation_of(&parts)).flatten();
            let admitted = admit(&layer, operation.as_deref(), Request::from_parts(parts, body)).await;
            if admitted.is_ok() {
                // Before the run, so that a request that waits here has no connection.
                poll_fn(|context| service.poll_ready(context)).await?;
            }
            let reply = match admitted {
                Ok(Admission::NotCovered(request)) => {
                    return service.call(request).await.map(|response| response.map(LayerBody::untouched));
                }
                Ok(Admission::Covered { ticket, request }) => {
                    run_in_task(&layer, ticket, ServiceCall { service, request }).await
                }
                Err(refused) => Err(refused),
            };
            let mut response = match reply {
                Ok(response) => response,
                Err(NoResponse::Rejected(rejection)) => rejected(&layer, operation.as_deref(), rejection),
                Err(NoResponse::Denied(Denied(response))) => response.map(LayerBody::whole),
                Err(NoResponse::Failed(error)) => return Err(error),
                // The panic goes on in the connection's task, where it would be without the layer.
                Err(NoResponse::Panicked(panic)) => resume_unwind(panic),
            };
            if let Some(key) = key {
                // Also over the echo of another service, which a handler has passed on.
                response.headers_mut().insert(IDEMPOTENCY_KEY, key);
            }
            Ok(response)
        })
    }
}

/// Runs the request in a task of its own: when the client hangs up, a run that has its place continues to its end. A
/// request that waits for its place, or pauses, ends with its client.
async fn run_in_task<H: Handler>(layer: &Arc<IdempotencyLayer>, ticket: Option<Ticket>, handler: H) -> Reply<H> {
    // Dropped with this future.
    let (_client, gone) = watch::channel(());
    let layer = layer.clone();
    // Boxed, because a task is moved several times before its first poll, and this one is large.
    let run = Box::pin(async move { run(&layer, ticket, gone, handler).await });
    // The task fails if the runtime is shutting down, or the layer itself has panicked.
    let ended = tokio::spawn(run.in_current_span()).await;
    ended.unwrap_or_else(|_| Err(crate::Error::Unanswered.into()))
}

async fn run<H: Handler>(
    layer: &IdempotencyLayer,
    ticket: Option<Ticket>,
    client: watch::Receiver<()>,
    mut handler: H,
) -> Reply<H> {
    let arrived = Instant::now();
    let first = arrived + ticket.as_ref().map_or(Duration::ZERO, |ticket| ticket.wait);
    let patience = Patience { first, place: first.max(arrived + layer.place_time()) };
    let asked = ticket.as_ref().map(|ticket| (&ticket.key, ticket.fingerprint));
    let place = layer.places.place(layer.bounds(), asked, patience, client).await;
    let Some(ticket) = &ticket else {
        let _place = place?;
        return match layer.mode {
            LayerMode::Transactional(options) => Transactional { layer, options }.run_without_key(handler).await,
            LayerMode::Leased(_) => Ok(handler.call(layer.run_timeout).await?.map(LayerBody::untouched)),
        };
    };
    // It has no run, which would count it.
    let place = place.inspect_err(|rejection| {
        if let Rejection::InFlight { .. } | Rejection::KeyReused = rejection {
            observe::outcome(layer.mode.of_records(), ticket.key.operation(), rejection.outcome());
        }
    })?;
    handler.extensions_mut().insert(ticket.key.clone());
    let reply = match layer.mode {
        LayerMode::Transactional(options) => Transactional { layer, options }.run(ticket, place, handler).await,
        LayerMode::Leased(options) => leased::run(options, layer, ticket, place, handler).await,
    };
    if let Err(NoResponse::Rejected(rejection)) = &reply {
        warn_of_unsettled(layer, ticket.key.operation(), rejection);
    }
    reply
}

fn warn_of_unsettled(layer: &IdempotencyLayer, operation: &str, rejection: &Rejection) {
    let (token, steps) = match rejection {
        Rejection::Indeterminate { token, steps } => (token, &**steps),
        Rejection::Exhausted { token, .. } => (token, &[][..]),
        _ => return,
    };
    // The metrics count each of them, and `unsettled` lists the tokens.
    let Some(left_out) = layer.lines.due(Some(operation), rejection.kind()) else { return };
    tracing::warn!(
        operation,
        left_out,
        token,
        steps = (!steps.is_empty()).then(|| tracing::field::debug(steps)),
        kind = rejection.kind(),
        "a request met an operation that waits for an operator"
    );
}

/// The response for a rejection, with the rejection in its extensions. The logs name the operation, which a span at
/// `debug` may not.
fn rejected<R>(layer: &IdempotencyLayer, operation: Option<&str>, rejection: Rejection) -> Response<LayerBody<R>> {
    let due = |line: &str| layer.lines.due(operation, line);
    match &rejection {
        Rejection::Unavailable(error) => {
            let Some(left_out) = due(&error.to_string()) else { return response_of(layer, rejection) };
            let error = &**error as &dyn Error;
            tracing::warn!(operation, left_out, error, "a request could not be made idempotent, and was refused");
        }
        Rejection::Misconfigured(error) => {
            let Some(left_out) = due(&error.to_string()) else { return response_of(layer, rejection) };
            let error = &**error as &dyn Error;
            tracing::error!(operation, left_out, error, "a request met a mistake in the service's set-up");
        }
        Rejection::TimedOut { limit } => {
            let Some(left_out) = due(rejection.kind()) else { return response_of(layer, rejection) };
            tracing::warn!(operation, left_out, ?limit, "a handler ran into the layer's time-out, and was dropped");
        }
        // It has no run, which would count it.
        Rejection::Overloaded { .. } => {
            observe::outcome(layer.mode.of_records(), operation.unwrap_or_default(), rejection.outcome());
        }
        _ => {}
    }
    response_of(layer, rejection)
}

fn response_of<R>(layer: &IdempotencyLayer, rejection: Rejection) -> Response<LayerBody<R>> {
    let mut response = (layer.rejection)(&rejection).map(LayerBody::whole);
    response.extensions_mut().insert(rejection);
    response
}
