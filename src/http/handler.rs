//! Calls the handler with a time limit, and catches its panics. The handler's response decides what happens to the key.

use std::future::poll_fn;
use std::mem::take;
use std::pin::Pin;
use std::time::Duration;

use http::{Extensions, HeaderMap, Method, Request, Response, header};
use tokio::time::{Instant, timeout};
use tower_service::Service;

use super::body::{ByteBody, LayerBody, has_no_body};
use super::extensions::NoStore;
use super::layer::IdempotencyLayer;
use super::rejection::{Denied, Mistake, Rejection};
use super::replay::{IDEMPOTENT_REPLAYED, to_record};
use crate::Error;
use crate::background::{Panic, caught};
use crate::outcome::StoredResponse;

/// A response of unknown length that does not end within this time counts as a stream. The transaction is open during
/// this time. If the length of a response is known to be within the `response_limit`, the response is not a stream, and
/// may take the rest of the `run_timeout`.
const STREAM_TIME: Duration = Duration::from_secs(1);
/// A `text/event-stream` that does not end within this time counts as a stream. Most event streams have no end, and
/// their client waits for the first event. A short event stream ends earlier, and can be replayed.
const EVENT_STREAM_TIME: Duration = Duration::from_millis(100);

pub(super) enum NoResponse<E> {
    Rejected(Rejection),
    /// A function of the service refused the request with a response of its own.
    Denied(Denied),
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

/// The reply to a request whose handler has responses with the body `R` and errors `E`.
pub(super) type Reply<R, E> = Result<Response<LayerBody<R>>, NoResponse<E>>;

type Answering<R, E> = Pin<Box<dyn Future<Output = Result<Response<R>, E>> + Send>>;

/// A request for the inner service, which was not called yet.
pub(super) struct Handler<R, E> {
    /// The extensions of the request.
    pub(super) extensions: Extensions,
    /// Whether the method is HEAD. The response to HEAD has no body, although its `Content-Length` may announce one.
    is_head: bool,
    call: Box<dyn FnOnce(Extensions) -> Answering<R, E> + Send>,
}

impl<R, E> Handler<R, E> {
    pub(super) fn new<S, B>(mut service: S, mut request: Request<B>) -> Self
    where
        S: Service<Request<B>, Response = Response<R>, Error = E, Future: Send> + Send + 'static,
        B: Send + 'static,
    {
        let (is_head, extensions) = (request.method() == Method::HEAD, take(request.extensions_mut()));
        let call = move |extensions| -> Answering<R, E> {
            *request.extensions_mut() = extensions;
            Box::pin(async move {
                // The service of a resumed request has not been polled yet. For any other request, the service was
                // polled before the run, and is still ready.
                poll_fn(|context| service.poll_ready(context)).await?;
                service.call(request).await
            })
        };
        Self { extensions, is_head, call: Box::new(call) }
    }

    /// Calls the handler, and drops it after `limit`, with everything that the handler has not given back.
    pub(super) async fn call(self, limit: Duration) -> Result<Response<R>, NoResponse<E>> {
        let answering = caught((self.call)(self.extensions));
        let answered = timeout(limit, answering).await.map_err(|_| Rejection::TimedOut { limit })?;
        // A panic of the handler must free the key, too.
        let answered = answered.map_err(NoResponse::Panicked)?;
        let mut response = answered.map_err(NoResponse::Failed)?;
        // A handler may pass on a response that another service has replayed. For this layer, such a response is new.
        response.headers_mut().remove(IDEMPOTENT_REPLAYED);
        Ok(response)
    }
}

/// How a run has ended, with the response to its request.
pub(super) enum Ran<R> {
    /// The operation is done, and the handler's response is stored.
    Performed(Response<LayerBody<R>>),
    /// The operation was done before.
    Replayed(Response<LayerBody<R>>),
    /// The handler's response is not stored, so the operation may run again.
    Failed(Response<LayerBody<R>>),
}

impl<R> Ran<R> {
    pub(super) fn into_response(self) -> Response<LayerBody<R>> {
        match self {
            Self::Performed(response) | Self::Replayed(response) | Self::Failed(response) => response,
        }
    }
}

pub(super) enum Conclusion<R> {
    /// The operation is done: the layer stores the response, then sends it. If `undo`, the handler's writes are undone.
    Store {
        stored: StoredResponse,
        response: Response<LayerBody<R>>,
        undo: bool,
    },
    Free {
        response: Response<LayerBody<R>>,
    },
}

#[derive(Clone, Copy)]
pub(super) struct Called {
    /// Whether the request has a key. Without a key, the layer only distinguishes success from failure, and stores
    /// nothing.
    keyed: bool,
    head: bool,
    pub(super) at: Instant,
}

impl Called {
    pub(super) fn now<R, E>(handler: &Handler<R, E>, keyed: bool) -> Self {
        Self { keyed, head: handler.is_head, at: Instant::now() }
    }
}

/// Decides about the handler's response. A response with a status below 400 is stored. An error is stored only if the
/// service has chosen its status. Any other response frees the key.
pub(super) async fn conclude<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    called: Called,
    response: Response<R>,
) -> Result<Conclusion<R>, NoResponse<E>> {
    // The body of the response also runs code of the service, which may panic.
    Ok(caught(judge(layer, called, response)).await.map_err(NoResponse::Panicked)??)
}

async fn judge<R: ByteBody>(
    layer: &IdempotencyLayer,
    called: Called,
    response: Response<R>,
) -> Result<Conclusion<R>, Rejection> {
    let status = response.status();
    let undo = called.keyed && layer.stored_errors.contains(&status);
    // A rejection by another idempotency layer, for example *in flight*, is not stored, whatever its status is.
    if status.as_u16() >= 400 && !undo || response.extensions().get::<Rejection>().is_some() {
        return Ok(Conclusion::Free { response: response.map(LayerBody::untouched) });
    }
    let content_type = response.headers().get(header::CONTENT_TYPE);
    if content_type.is_some_and(|value| fails_with_success(value.as_bytes())) {
        return Err(Mistake::Grpc.into());
    }
    let (mut parts, body) = response.into_parts();
    // An upgraded connection cannot be replayed.
    let storable = parts.extensions.get::<NoStore>().is_none() && !status.is_informational();
    let body = if called.keyed && storable {
        read(layer, called, &mut parts, body).await?
    } else {
        LayerBody::untouched(body)
    };
    let stored_body = body.as_whole().filter(|data| data.len() <= layer.response_limit).map(|data| data.to_vec());
    let stored = to_record(&parts, stored_body, &layer.replayed_headers);
    Ok(Conclusion::Store { stored, response: Response::from_parts(parts, body), undo })
}

/// Whether a failed call with this content type has the status 200, as in gRPC and in Connect streams.
fn fails_with_success(content_type: &[u8]) -> bool {
    [&b"application/grpc"[..], b"application/connect+"]
        .iter()
        .any(|kind| content_type.get(..kind.len()).is_some_and(|start| start.eq_ignore_ascii_case(kind)))
}

async fn read<R: ByteBody>(
    layer: &IdempotencyLayer,
    called: Called,
    parts: &mut http::response::Parts,
    body: R,
) -> Result<LayerBody<R>, Mistake> {
    let (limit, empty) = (layer.response_limit, has_no_body(called.head, parts.status));
    let mut deadline = Instant::now() + if is_event_stream(&parts.headers) { EVENT_STREAM_TIME } else { STREAM_TIME };
    if body.size_hint().upper().is_some_and(|upper| upper <= limit as u64) {
        deadline = deadline.max(called.at + layer.run_timeout);
    }
    let read = LayerBody::of_response(body, &mut parts.headers, empty, limit, deadline).await;
    read.map_err(|broken| Mistake::BrokenResponse(broken.to_string()))
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let media_type = value.split(|byte| *byte == b';').next().unwrap_or_default();
    media_type.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}
