//! What a handler's response means for its key.

use std::time::Duration;

use http::response::Parts;
use http::{HeaderMap, Response, header};
use tokio::time::Instant;

use super::body::{LayerBody, ResponseBody, has_no_body};
use super::by_reference::Reference;
use super::handler::{Handler, NoResponse};
use super::layer::{IdempotencyLayer, LayerMode};
use super::rejection::{Misconfigured, Rejection};
use super::replay::to_record;
use crate::caught::caught;
use crate::outcome::Response as Stored;

/// A response of unknown length that does not end within this time counts as a stream. The transaction is open
/// meanwhile. A response that is known to be small enough is not a stream, and may take the rest of the run's time.
const STREAM_TIME: Duration = Duration::from_secs(1);
/// The same for `text/event-stream`. Most of these have no end that is worth waiting for, and their client waits for
/// the first event. A short one has ended by then, and can be replayed.
const EVENT_STREAM_TIME: Duration = Duration::from_millis(100);

/// Put this into the extensions of a response that the layer sends and must not store. With axum:
/// `(Extension(NoStore), secret).into_response()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoStore;

/// Put this into the extensions of an error response to say why the operation failed. In a leased layer it becomes the
/// last error of the record, which the console and `idempotency-janitor show` print, in place of *the handler answered
/// 503 Service Unavailable*. With axum: `(Extension(LastError(reason)),
/// StatusCode::SERVICE_UNAVAILABLE).into_response()`.
///
/// The client does not see it. The record keeps the first 2000 characters. A transactional layer keeps nothing of a
/// failure, and ignores it. So does every layer for a response that it stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError(pub String);

/// What happens to the key.
pub(super) enum Conclusion<R> {
    /// The operation is done: store it with the key, then send the response. `undo`: without the handler's writes.
    Store { stored: Stored, response: Response<LayerBody<R>>, undo: bool },
    /// The operation failed: free the key, then send the response.
    Free { response: Response<LayerBody<R>> },
}

/// The call of a handler.
#[derive(Clone, Copy)]
pub(super) struct Called {
    /// Without a key nothing is stored, and only success or failure counts.
    pub(super) keyed: bool,
    pub(super) head: bool,
    pub(super) at: Instant,
}

impl Called {
    pub(super) fn now(handler: &impl Handler, keyed: bool) -> Self {
        Self { keyed, head: handler.is_head(), at: Instant::now() }
    }
}

/// Judges the handler's response. A response below 400 is stored, and so is one of the errors that the service has
/// chosen. Any other response frees the key.
pub(super) async fn conclude<R: ResponseBody, E>(
    layer: &IdempotencyLayer,
    called: Called,
    response: Response<R>,
) -> Result<Conclusion<R>, NoResponse<E>> {
    // The body is code of the handler, too, and may panic.
    Ok(caught(judge(layer, called, response)).await.map_err(NoResponse::Panicked)??)
}

async fn judge<R: ResponseBody>(
    layer: &IdempotencyLayer,
    called: Called,
    response: Response<R>,
) -> Result<Conclusion<R>, Misconfigured> {
    let status = response.status();
    let undo = called.keyed && layer.stored_errors.contains(&status);
    // The rejection of another layer, such as *in flight*, is no answer, also if the service gives it another status.
    if status.as_u16() >= 400 && !undo || response.extensions().get::<Rejection>().is_some() {
        return Ok(Conclusion::Free { response: response.map(LayerBody::untouched) });
    }
    let content_type = response.headers().get(header::CONTENT_TYPE);
    if content_type.is_some_and(|value| fails_with_success(value.as_bytes())) {
        return Err(Misconfigured::Grpc);
    }
    let (mut parts, body) = response.into_parts();
    let reference = parts.extensions.remove::<Reference>();
    // An upgraded connection cannot be replayed.
    let storable = parts.extensions.get::<NoStore>().is_none() && !status.is_informational();
    if let Some(reference) = reference.filter(|_| storable) {
        // A response that cannot be replayed must not commit. Under a lease the effect has happened already.
        if called.keyed && matches!(layer.mode, LayerMode::Transactional(_)) {
            reference.check(layer)?;
        }
        let stored = reference.into_record(status, layer.response_limit);
        return Ok(Conclusion::Store {
            stored,
            response: Response::from_parts(parts, LayerBody::untouched(body)),
            undo,
        });
    }
    let body =
        if called.keyed && storable { read(layer, called, &parts, body).await? } else { LayerBody::untouched(body) };
    let stored_body = body.as_whole().filter(|data| data.len() <= layer.response_limit).map(|data| data.to_vec());
    let stored = to_record(&parts, stored_body, &layer.replayed_headers);
    Ok(Conclusion::Store { stored, response: Response::from_parts(parts, body), undo })
}

/// Whether a call with this content type has the status 200 even if it fails: gRPC, and the streams of Connect.
fn fails_with_success(content_type: &[u8]) -> bool {
    [&b"application/grpc"[..], b"application/connect+"]
        .iter()
        .any(|kind| content_type.get(..kind.len()).is_some_and(|start| start.eq_ignore_ascii_case(kind)))
}

async fn read<R: ResponseBody>(
    layer: &IdempotencyLayer,
    called: Called,
    parts: &Parts,
    body: R,
) -> Result<LayerBody<R>, Misconfigured> {
    let (limit, status) = (layer.response_limit, parts.status);
    let mut deadline = Instant::now() + if is_event_stream(&parts.headers) { EVENT_STREAM_TIME } else { STREAM_TIME };
    if body.size_hint().upper().is_some_and(|upper| upper <= limit as u64) {
        deadline = deadline.max(called.at + layer.run_timeout);
    }
    let read = LayerBody::of_response(body, has_no_body(called.head, status), limit, deadline).await;
    read.map_err(|broken| Misconfigured::BrokenResponse(broken.to_string()))
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let media_type = value.split(|byte| *byte == b';').next().unwrap_or_default();
    media_type.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}
