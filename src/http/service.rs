//! The service of the layer: it admits a request, runs the request in a task of its own, and answers.

use std::future::{Future, poll_fn};
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderMap, HeaderValue, Request, Response, header};
use tokio::sync::oneshot;
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument as _;

use super::body::{ByteBody, LayerBody, Unread};
use super::extensions::{FromResumer, LentLease, is_covered};
use super::handler::{Handler, NoResponse, Reply};
use super::layer::{IdempotencyLayer, LayerMode};
use super::rejection::{Denied, Mistake, Rejection};
use super::request::{IDEMPOTENCY_KEY, MalformedKey, Ticket, key_value, only_line, to_store};
use super::{leased, transactional};
use crate::key::{Check, MAX_PART_BYTES, checked, checked_recorded};
use crate::{BoxError, Error, Key, observe};

/// The longest form of a key in a header: quotes around characters that are all escaped.
const LONGEST_ECHO: usize = 2 + 2 * MAX_PART_BYTES;

/// How much of a body that is too large is read and thrown away, as a multiple of the limit. A client that exceeds the
/// limit by mistake usually sends less than this multiple.
const DISCARDED: usize = 8;
/// The longest time to throw away a body that is too large. A client that is slower gets its answer after this time.
const DISCARD_TIME: Duration = Duration::from_secs(10);

/// The service that [`IdempotencyLayer`](super::IdempotencyLayer) makes from an inner service. A run that has its
/// places continues even if the future of its response is dropped.
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

    /// Is always ready. The inner service is polled after the body was read, because the poll may reserve something for
    /// the request, such as a permit of a concurrency limit.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (layer, mut service) = (self.layer.clone(), self.inner.clone());
        Box::pin(async move {
            let echo = echo(&layer, request.headers());
            let Admitted { operation, admission } = admit(&layer, request).await;
            if admission.is_ok() {
                // The inner service is polled before the run, so that the request holds no database connection while it
                // waits here.
                poll_fn(|context| service.poll_ready(context)).await?;
            }
            let reply = match admission {
                Ok(Admission::PassedOn(request)) => {
                    return service.call(request).await.map(|response| response.map(LayerBody::untouched));
                }
                Ok(Admission::Covered { ticket, request }) => {
                    run_in_task(&layer, operation, ticket, Handler::new(service, request)).await
                }
                Err(refused) => Err(refused),
            };
            let mut response = match reply {
                Ok(response) => response,
                Err(NoResponse::Rejected(rejection)) => {
                    let mut response = (layer.rejection)(&rejection).map(LayerBody::whole);
                    response.extensions_mut().insert(rejection);
                    response
                }
                Err(NoResponse::Denied(Denied(response))) => response.map(LayerBody::whole),
                Err(NoResponse::Failed(error)) => return Err(error),
                // The panic continues in the connection's task, as it would without the layer.
                Err(NoResponse::Panicked(panic)) => resume_unwind(panic),
            };
            if let Some(key) = echo {
                // If a handler has passed on another service's response, the key of that response is replaced here.
                response.headers_mut().insert(IDEMPOTENCY_KEY, key);
            }
            Ok(response)
        })
    }
}

/// Returns the client's `Idempotency-Key`, which the layer repeats in its response. The header is marked as sensitive,
/// so that no log of headers shows the key. A key that is too long for any value is not repeated, because a proxy may
/// answer 502 for a head of some kilobytes, and the client would not see the refusal of its key.
fn echo(layer: &IdempotencyLayer, headers: &HeaderMap) -> Option<HeaderValue> {
    let key = only_line(headers, &IDEMPOTENCY_KEY).filter(|_| layer.key_from.is_none())?;
    let mut key = Some(key).filter(|key| key.len() <= LONGEST_ECHO)?.clone();
    key.set_sensitive(true);
    Some(key)
}

/// The operation of a request, and whether the request is admitted. The operation is `None` if the layer does not cover
/// the request, or if the operation has no name.
struct Admitted<B, E> {
    operation: Option<String>,
    admission: Result<Admission<B>, NoResponse<E>>,
}

#[allow(clippy::large_enum_variant, reason = "moved once for each request; a box would be an allocation")]
enum Admission<B> {
    /// The layer does not cover the request's method, or a resumer has claimed the request's key.
    PassedOn(Request<LayerBody<B>>),
    /// The layer covers the request. With a ticket, the request is performed once. Without a ticket, the request is
    /// performed each time it comes.
    Covered { ticket: Option<Ticket>, request: Request<LayerBody<B>> },
}

async fn admit<B: ByteBody, E>(layer: &IdempotencyLayer, request: Request<B>) -> Admitted<B, E> {
    if !layer.methods.contains(request.method()) {
        let admission = Ok(Admission::PassedOn(request.map(LayerBody::untouched)));
        return Admitted { operation: None, admission };
    }
    let (parts, body) = request.into_parts();
    let operation = layer.operation_of(&parts);
    let admission = admit_covered(layer, operation.as_deref(), parts, body).await;
    if let Err(NoResponse::Rejected(rejection)) = &admission {
        count_without_run(layer, operation.as_deref(), rejection);
        rejection.log(operation.as_deref(), &layer.lines);
    }
    Admitted { operation, admission }
}

/// The rules for a request that depend on its sender. A resumed request is not judged as a new request, because its
/// client has sent it before, and its key has a record.
struct Rules {
    /// The rule for the text of each part of the key.
    check: Check,
    shortest_key: usize,
    /// How many bytes the bodies that arrive or wait may hold together. A resumed request is never refused for lack of
    /// room, because a refusal would cost it one of its attempts.
    most_held: usize,
    resumed: Option<FromResumer>,
}

impl Rules {
    /// Returns the rules for a request. Refuses a request for which an outer layer holds a key or a transaction. The
    /// claim of this layer would wait for the outer layer, or would commit before the outer layer does.
    fn of(layer: &IdempotencyLayer, extensions: &Extensions) -> Result<Self, Mistake> {
        let resumed = extensions.get::<FromResumer>().filter(|_| matches!(layer.mode, LayerMode::Leased(_)));
        if let Some(resumed) = resumed.cloned() {
            let (check, most_held) = (checked_recorded as Check, usize::MAX);
            return Ok(Self { check, shortest_key: 0, most_held, resumed: Some(resumed) });
        }
        if is_covered(extensions) {
            return Err(Mistake::CoveredTwice);
        }
        let (shortest_key, most_held) = (layer.shortest_key, layer.most_held());
        Ok(Self { check: checked, shortest_key, most_held, resumed: None })
    }

    fn key(&self, scope: String, operation: &str, value: String) -> Result<Key, Rejection> {
        if value.chars().count() < self.shortest_key {
            return Err(MalformedKey::TooShort { shortest: self.shortest_key }.into());
        }
        Key::of(self.check, scope, operation.to_owned(), value).map_err(Rejection::of_key)
    }

    /// Whether a resumer has claimed this key for the request. If so, the layer must not claim the key again, because
    /// this claim would find the resumer's claim.
    fn passes_on(self, key: &Key, extensions: &mut Extensions) -> Result<bool, Rejection> {
        let Some(resumed) = self.resumed else { return Ok(false) };
        extensions.remove::<FromResumer>();
        resumed.meets(key)?;
        Ok(LentLease::is_live(extensions, key))
    }
}

/// Checks a request that the layer covers, and makes its ticket. No key is claimed yet, so a slow or broken upload
/// costs no connection. A check may refuse the request or end the admission, so this order decides the answer, and is a
/// part of the contract. The numbers are those of the rules for clients in [the module](super):
///
/// - No outer layer covers the request ([`Rules::of`]).
/// - Rule 1 applies to a header that is missing.
/// - Rule 2 applies. It comes before rule 3, so that a client without access gets the refusal of the scope function,
///   and not an error about its key.
/// - Rule 3 applies to the header ([`value_of_header`]), and the operation has a name.
/// - Rule 4 applies while the body arrives ([`read`]).
/// - Rules 1 and 3 apply to a value that is not in the header ([`IdempotencyLayer::key_from`]).
/// - Rule 3 applies to the length of the value and to the whole key ([`Rules::key`]).
/// - A resumed request has the key of its record, and is passed on ([`Rules::passes_on`]).
/// - Rule 4 applies to a body that has no fingerprint.
/// - The request can be stored, if the layer stores requests ([`stored`]).
///
/// The other rules apply in [`run_in_task`].
async fn admit_covered<B: ByteBody, E>(
    layer: &IdempotencyLayer,
    operation: Option<&str>,
    mut parts: Parts,
    body: B,
) -> Result<Admission<B>, NoResponse<E>> {
    let arrived = Instant::now();
    let rules = Rules::of(layer, &parts.extensions)?;
    let in_header = layer.key_from.is_none();
    if in_header && !layer.key_required && !parts.headers.contains_key(IDEMPOTENCY_KEY) {
        let body = read(layer, &rules, None, &parts, body).await?;
        return Ok(Admission::Covered { ticket: None, request: Request::from_parts(parts, body) });
    }
    let scope = (layer.scope)(&parts).map_err(NoResponse::Denied)?;
    let value = if in_header { Some(value_of_header(&rules, &parts.headers)?) } else { None };
    let operation = operation.ok_or(Mistake::NoOperation)?;
    let body = read(layer, &rules, Some(&scope), &parts, body).await?;
    let value = match &layer.key_from {
        Some(key_from) => key_from(&parts, body.data()).map_err(NoResponse::Denied)?,
        None => value,
    };
    let Some(value) = value else {
        if layer.key_required {
            return Err(Rejection::MissingKey.into());
        }
        return Ok(Admission::Covered { ticket: None, request: Request::from_parts(parts, body) });
    };
    let key = rules.key(scope, operation, value)?;
    if rules.passes_on(&key, &mut parts.extensions)? {
        return Ok(Admission::PassedOn(Request::from_parts(parts, body)));
    }
    let fingerprint = layer.fingerprint.fingerprint(&parts, body.data()).map_err(Rejection::InvalidBody)?;
    let stored = stored(layer, &parts, body.data()).map_err(NoResponse::Denied)?;
    let ticket = Some(Ticket { key: Arc::new(key), fingerprint, arrived, stored });
    Ok(Admission::Covered { ticket, request: Request::from_parts(parts, body) })
}

fn value_of_header(rules: &Rules, headers: &HeaderMap) -> Result<String, Rejection> {
    key_value(headers, rules.check)?.ok_or(Rejection::MissingKey)
}

/// Returns the request as the claim stores it, or `None` if the layer stores no requests.
fn stored(layer: &IdempotencyLayer, parts: &Parts, body: &[u8]) -> Result<Option<Vec<u8>>, Denied> {
    match layer.mode {
        LayerMode::Leased(options) if options.stores_requests() => {
            let of_fingerprint = &layer.fingerprint.headers;
            let kept = |name: &_| layer.stored_request_headers.contains(name) || of_fingerprint.contains(name);
            Ok(Some(to_store(parts, body, kept)?))
        }
        _ => Ok(None),
    }
}

/// Reads a body to its end, so that a slow upload needs neither a place nor a connection.
async fn read<B: ByteBody>(
    layer: &IdempotencyLayer,
    rules: &Rules,
    scope: Option<&str>,
    parts: &Parts,
    body: B,
) -> Result<LayerBody<B>, Rejection> {
    let limit = layer.request_limit;
    let hold = layer.held.hold(scope, rules.most_held);
    let (unread, rejection) = match LayerBody::of_request(body, limit, hold).await {
        Ok(body) => return Ok(body),
        Err(Unread::Broken(broken)) => return Err(Rejection::of_body(&broken)),
        Err(Unread::TooLarge(body)) => (body, Rejection::BodyTooLarge { limit: Some(limit) }),
        Err(Unread::NoRoom(body)) => (body, Rejection::Overloaded { limit: layer.max_runs }),
        Err(Unread::NoRoomInShare(body)) => (body, Rejection::TooManyRequests { limit: layer.bounds().of_one_scope }),
    };
    // If the connection were closed while the client still writes, the client would see a reset instead of the answer.
    // But a client that waits for `100 Continue` sends nothing until the body is read.
    if !(parts.headers.contains_key(header::EXPECT) && unread.is_unread()) {
        unread.discard(limit.saturating_mul(DISCARDED), DISCARD_TIME).await;
    }
    Err(rejection)
}

/// Runs the request in a task of its own. When the client hangs up, a run that has its place continues to its end. A
/// request that still waits for its place, or pauses between two polls, ends when the client hangs up.
async fn run_in_task<R: ByteBody + Send + 'static, E: Send + 'static>(
    layer: &Arc<IdempotencyLayer>,
    operation: Option<String>,
    ticket: Option<Ticket>,
    handler: Handler<R, E>,
) -> Reply<R, E> {
    // The sender is dropped with this future.
    let (_client, gone) = oneshot::channel();
    let run = run(layer.clone(), operation.clone(), ticket, gone, handler);
    // The task fails if the runtime is shutting down, or the layer itself has panicked.
    let ended = tokio::spawn(run.in_current_span()).await;
    ended.unwrap_or_else(|_| {
        let rejection = Rejection::of(Error::Unanswered);
        rejection.log(operation.as_deref(), &layer.lines);
        Err(rejection.into())
    })
}

async fn run<R: ByteBody, E>(
    layer: Arc<IdempotencyLayer>,
    operation: Option<String>,
    ticket: Option<Ticket>,
    client: oneshot::Receiver<()>,
    mut handler: Handler<R, E>,
) -> Reply<R, E> {
    let (layer, operation) = (&*layer, operation.as_deref());
    let turn = layer.runs.turn(layer.bounds(), ticket.as_ref(), client).await;
    let turn = turn.inspect_err(|rejection| count_without_run(layer, operation, rejection))?;
    if let Some(ticket) = &ticket {
        handler.extensions.insert(Key::clone(&ticket.key));
    }
    // These futures are large. They are boxed here, so that a request needs no memory for them while it waits.
    let reply = match (layer.mode, &ticket) {
        (LayerMode::Transactional(options), Some(ticket)) => {
            Box::pin(transactional::run(layer, options, ticket, turn, handler)).await
        }
        (LayerMode::Transactional(_), None) => Box::pin(transactional::run_without_key(layer, handler)).await,
        (LayerMode::Leased(options), Some(ticket)) => {
            Box::pin(leased::run(layer, options, ticket, turn, handler)).await
        }
        (LayerMode::Leased(_), None) => Box::pin(leased::run_without_key(layer, handler)).await,
    };
    if let Err(NoResponse::Rejected(rejection)) = &reply {
        // The rejection is logged in this task, because the client may be gone.
        rejection.log(operation, &layer.lines);
    }
    reply
}

/// Counts a request that was refused before it had a run, if the refusal is an outcome of its key or of the load. The
/// run counts any other outcome. Nothing counts a request that a client or the service has made wrongly.
fn count_without_run(layer: &IdempotencyLayer, operation: Option<&str>, rejection: &Rejection) {
    if let Rejection::InFlight { .. }
    | Rejection::KeyReused
    | Rejection::Overloaded { .. }
    | Rejection::TooManyRequests { .. } = rejection
    {
        observe::outcome(layer.mode.of_records(), operation.unwrap_or_default(), rejection.outcome());
    }
}
