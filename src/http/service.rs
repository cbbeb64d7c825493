//! The service: admit a request, run it in a task of its own, answer.

use std::error::Error;
use std::future::{Future, poll_fn};
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{self, Duration};

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderName, Request, Response, header};
use tokio::sync::watch;
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument as _;

use super::body::{LayerBody, Unread};
use super::handler::{Handler, NoResponse, Reply, ServiceCall};
use super::layer::{IdempotencyLayer, LayerMode};
use super::leased::{self, LentLease, Resumed};
use super::places::{Patience, Ticket};
use super::rejection::{Denied, Misconfigured, Rejection};
use super::request::{IDEMPOTENCY_KEY, MalformedKey, key_value, only_line, to_store};
use super::transactional::{Transactional, is_lent};
use crate::key::{checked, checked_recorded};
use crate::trace::Trace;
use crate::{BoxError, InvalidKey, Key, KeyPart, observe};

/// `traceparent`, of W3C Trace Context. Several lines are invalid.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// How much of a body that is too large is read and thrown away, in limits. A client that sends more is not one that
/// has misjudged the limit.
const DISCARDED: usize = 8;
/// The longest time for this. A client that needs longer waits for an answer that it could have now.
const DISCARD_TIME: Duration = Duration::from_secs(10);

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

/// How the layer treats a request.
enum Admission<B> {
    /// The layer does not cover the request's method, or a resumer has claimed the request's key.
    NotCovered(Request<LayerBody<B>>),
    /// The request is performed once, or, without a ticket, each time it comes.
    Covered { ticket: Option<Ticket>, request: Request<LayerBody<B>> },
}

/// Reads the request and makes its ticket. Nothing is claimed yet, so a slow or broken upload costs no connection.
async fn admit<B, E>(
    layer: &IdempotencyLayer,
    operation: Option<&str>,
    request: Request<B>,
) -> Result<Admission<B>, NoResponse<E>>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    let arrived = time::Instant::now();
    if !layer.methods.contains(request.method()) {
        return Ok(Admission::NotCovered(request.map(LayerBody::untouched)));
    }
    // A layer in front holds a key or a transaction for this request: the claim would wait for it, or commit without
    // it. The key of a resumed request is this layer's own, and its record exists.
    let is_resumed = matches!(layer.mode, LayerMode::Leased(_)) && request.extensions().get::<Resumed>().is_some();
    if !is_resumed && (request.extensions().get::<Key>().is_some() || is_lent(request.extensions())) {
        return Err(Misconfigured::CoveredTwice.into());
    }
    let check = if is_resumed { checked_recorded } else { checked };
    let from_header = layer.key_from.is_none().then(|| key_value(request.headers(), check));
    if matches!(from_header, Some(Ok(None))) && !layer.key_required {
        let (parts, body) = request.into_parts();
        let (_, body) = read(layer, None, &parts, body).await?;
        return Ok(Admission::Covered { ticket: None, request: Request::from_parts(parts, body) });
    }
    let (mut parts, body) = request.into_parts();
    // Before any complaint about the key: a client without access gets the scope's answer.
    let scope = (layer.scope)(&parts).map_err(NoResponse::Denied)?;
    let from_header = from_header.transpose()?;
    if from_header == Some(None) {
        return Err(Rejection::MissingKey.into());
    }
    let operation = operation.ok_or(Misconfigured::NoOperation)?;

    let (data, body) = read(layer, Some(&scope), &parts, body).await?;
    let value = match &layer.key_from {
        None => from_header.flatten(),
        Some(value) => value(&parts, &data).map_err(NoResponse::Denied)?,
    };
    let ticket = match value {
        // A stored key is resumed, however short it is.
        Some(value) if !is_resumed && value.chars().count() < layer.shortest_key => {
            return Err(Rejection::from(MalformedKey::TooShort { shortest: layer.shortest_key }).into());
        }
        Some(value) => {
            let trace = only_line(&parts.headers, &TRACEPARENT).and_then(|line| line.to_str().ok());
            let trace = Trace::of(trace.unwrap_or_default());
            let key =
                if is_resumed { Key::recorded(scope, operation, value) } else { Key::new(scope, operation, value) };
            let key = key.map_err(invalid_key)?;
            let is_leased = matches!(layer.mode, LayerMode::Leased(_));
            let resumed: Option<Resumed> = if is_leased { parts.extensions.remove() } else { None };
            if let Some(resumed) = &resumed {
                resumed.meets(&key)?;
            }
            if is_leased && is_under_lease(&parts.extensions, &key) {
                return Ok(Admission::NotCovered(Request::from_parts(parts, body)));
            }
            let fingerprint = layer.fingerprint.fingerprint(&parts, &data).map_err(Rejection::InvalidBody)?;
            let wait = layer.mode.wait();
            let stored = match layer.mode {
                LayerMode::Leased(options) if options.stores_requests() => {
                    let of_fingerprint = &layer.fingerprint.headers;
                    let kept = |name: &_| layer.stored_headers.contains(name) || of_fingerprint.contains(name);
                    Some(to_store(&parts, &data, kept).map_err(|status| NoResponse::Denied(status.into()))?)
                }
                _ => None,
            };
            Some(Ticket { key, fingerprint, trace, wait, arrived, stored })
        }
        None if layer.key_required => return Err(Rejection::MissingKey.into()),
        None => None,
    };
    Ok(Admission::Covered { ticket, request: Request::from_parts(parts, body) })
}

/// Reads a body to its end, so that no place and no connection waits for a slow upload.
async fn read<B>(
    layer: &IdempotencyLayer,
    scope: Option<&str>,
    parts: &Parts,
    body: B,
) -> Result<(Bytes, LayerBody<B>), Rejection>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    let limit = layer.request_limit;
    // A refusal would cost a resumed request one of its attempts.
    let resumed = parts.extensions.get::<Resumed>().is_some();
    let hold = layer.held.hold(scope, if resumed { usize::MAX } else { layer.most_held() });
    let (unread, rejection) = match LayerBody::of_request(body, limit, hold).await {
        Ok(body) => return Ok((body.data().clone(), body)),
        Err(Unread::Broken(broken)) => return Err(Rejection::of_body(&broken)),
        Err(Unread::TooLarge(body)) => (body, Rejection::BodyTooLarge { limit: Some(limit) }),
        Err(Unread::NoRoom(body)) => (body, Rejection::Overloaded { limit: layer.max_runs }),
    };
    // If the connection were closed while the client still writes, the client would see a reset in place of the answer.
    // But a client that waits for `100 Continue` sends the body only if somebody reads it.
    if !(parts.headers.contains_key(header::EXPECT) && unread.is_unread()) {
        unread.discard(limit.saturating_mul(DISCARDED), DISCARD_TIME).await;
    }
    Err(rejection)
}

fn invalid_key(invalid: InvalidKey) -> Rejection {
    match invalid.part() {
        // A part of the path, which the client has chosen, may be a part of the operation.
        KeyPart::Value | KeyPart::Operation => MalformedKey::from(invalid).into(),
        KeyPart::Scope => Misconfigured::Refused(invalid.into()).into(),
    }
}

/// Whether a resumer has claimed this key for the request. The layer would meet that claim.
fn is_under_lease(extensions: &Extensions, key: &Key) -> bool {
    LentLease::of(extensions).is_some_and(|lent| lent.lease.key() == key && !lent.lease.is_lost())
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
