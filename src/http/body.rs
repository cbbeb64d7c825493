//! The bodies of requests and responses: read whole up to a limit, or passed on.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

/// The body of a request or a response that went through the layer: the bytes that the layer has read, then the rest of
/// the original.
pub struct LayerBody<B> {
    data: Bytes,
    trailers: Option<HeaderMap>,
    rest: Option<Pin<Box<B>>>,
}

impl<B> LayerBody<B> {
    pub(super) fn untouched(body: B) -> Self {
        Self { data: Bytes::new(), trailers: None, rest: Some(Box::pin(body)) }
    }

    pub(super) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { data, trailers, rest: None }
    }
}

impl<B: http_body::Body<Data = Bytes>> http_body::Body for LayerBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if !self.data.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.data)))));
        }
        if let Some(trailers) = self.trailers.take() {
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        match &mut self.rest {
            Some(rest) => rest.as_mut().poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none() && self.rest.as_ref().is_none_or(|rest| rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.data.len() as u64;
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(read));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint
    }
}

impl<B> fmt::Debug for LayerBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerBody").field("read", &self.data.len()).field("rest", &self.rest.is_some()).finish()
    }
}

/// The result of reading a body up to a [`Limit`].
pub(super) enum Read<B> {
    Whole {
        data: Bytes,
        trailers: Option<HeaderMap>,
    },
    /// The body is over the limit, or did not end in time. Nothing of it is lost.
    Unfinished(LayerBody<B>),
}

/// How far to read.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    pub(super) bytes: usize,
    /// After this time a body counts as a stream that may never end.
    pub(super) time: Option<Duration>,
}

/// Reads a body to its end or its limit. A body that announces a length over the limit is not touched.
pub(super) async fn read<B>(body: B, limit: Limit) -> Result<Read<B>, B::Error>
where
    B: http_body::Body<Data = Bytes>,
{
    if body.size_hint().lower() > limit.bytes as u64 {
        return Ok(Read::Unfinished(LayerBody::untouched(body)));
    }
    let deadline = limit.time.map(|time| Instant::now() + time);
    let mut rest = Box::pin(body);
    let mut data = Chunks::default();
    let mut trailers = None;
    loop {
        let frame = match deadline {
            None => rest.frame().await,
            // The time-out alone would not end a body that always has a frame ready.
            Some(at) if Instant::now() >= at => break,
            Some(at) => match timeout_at(at, rest.frame()).await {
                Ok(frame) => frame,
                Err(_) => break,
            },
        };
        let Some(frame) = frame.transpose()? else { return Ok(Read::Whole { data: data.into_bytes(), trailers }) };
        match frame.into_data() {
            Ok(chunk) => data.push(chunk),
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
        if data.len() > limit.bytes {
            break;
        }
    }
    Ok(Read::Unfinished(LayerBody { data: data.into_bytes(), trailers, rest: Some(rest) }))
}

/// Joins chunks as they come. A body may arrive byte by byte, and a list of chunks would take a hundred times its size.
/// Nearly all bodies are one chunk, which is not copied.
#[derive(Default)]
struct Chunks {
    first: Bytes,
    joined: BytesMut,
}

impl Chunks {
    fn push(&mut self, chunk: Bytes) {
        if self.len() == 0 {
            self.first = chunk;
            return;
        }
        if self.joined.is_empty() {
            self.joined.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.joined.extend_from_slice(&chunk);
    }

    fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    fn into_bytes(self) -> Bytes {
        if self.joined.is_empty() { self.first } else { self.joined.freeze() }
    }
}
