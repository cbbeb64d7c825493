//! Bodies: read whole, up to a limit, or passed on.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

/// The body of what goes through the layer, in either direction: what was read already, then what is left of the original.
pub struct Body<B> {
    data: Bytes,
    trailers: Option<HeaderMap>,
    rest: Option<Pin<Box<B>>>,
}

impl<B> Body<B> {
    pub(super) fn untouched(body: B) -> Self {
        Self { data: Bytes::new(), trailers: None, rest: Some(Box::pin(body)) }
    }

    pub(super) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { data, trailers, rest: None }
    }
}

impl<B: http_body::Body<Data = Bytes>> http_body::Body for Body<B> {
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

impl<B> fmt::Debug for Body<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").field("read", &self.data.len()).field("rest", &self.rest.is_some()).finish()
    }
}

/// What reading a body came to.
pub(super) enum Read<B> {
    Whole {
        data: Bytes,
        trailers: Option<HeaderMap>,
    },
    /// Over the limit, or not at its end in time. Everything is still there.
    Unfinished(Body<B>),
}

/// How far to read.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    pub(super) bytes: usize,
    /// Since when a body counts as a stream that may never end.
    pub(super) patience: Option<Duration>,
}

/// Reads a body to its end or its limit. One that says in advance that it is too long is not touched.
pub(super) async fn read<B>(body: B, limit: Limit) -> Result<Read<B>, B::Error>
where
    B: http_body::Body<Data = Bytes>,
{
    if body.size_hint().lower() > limit.bytes as u64 {
        return Ok(Read::Unfinished(Body::untouched(body)));
    }
    let give_up_at = limit.patience.map(|patience| Instant::now() + patience);
    let mut rest = Box::pin(body);
    let mut data = Joined::default();
    let mut trailers = None;
    loop {
        let frame = match give_up_at {
            None => rest.frame().await,
            // Looked at here too: the time-out does not come to a body that is always ready.
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
    Ok(Read::Unfinished(Body { data: data.into_bytes(), trailers, rest: Some(rest) }))
}

/// Chunks in one piece: a body may come byte by byte, and each chunk that is kept takes a hundred times that. One chunk, as
/// nearly all bodies are, is not copied.
#[derive(Default)]
struct Joined {
    first: Bytes,
    all: BytesMut,
}

impl Joined {
    fn push(&mut self, chunk: Bytes) {
        if self.len() == 0 {
            self.first = chunk;
            return;
        }
        if self.all.is_empty() {
            self.all.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.all.extend_from_slice(&chunk);
    }

    fn len(&self) -> usize {
        self.first.len() + self.all.len()
    }

    fn into_bytes(self) -> Bytes {
        if self.all.is_empty() { self.first } else { self.all.freeze() }
    }
}
