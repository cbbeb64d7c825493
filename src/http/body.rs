//! Bodies: read whole, up to a limit, or passed on.

use std::collections::VecDeque;
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
    read: VecDeque<Frame<Bytes>>,
    rest: Option<Pin<Box<B>>>,
}

impl<B> Body<B> {
    pub(super) fn untouched(body: B) -> Self {
        Self { read: VecDeque::new(), rest: Some(Box::pin(body)) }
    }

    pub(super) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        let data = (!data.is_empty()).then(|| Frame::data(data));
        Self { read: data.into_iter().chain(trailers.map(Frame::trailers)).collect(), rest: None }
    }
}

impl<B: http_body::Body<Data = Bytes>> http_body::Body for Body<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(frame) = self.read.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        match &mut self.rest {
            Some(rest) => rest.as_mut().poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.as_ref().is_none_or(|rest| rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let read: u64 = self.read.iter().filter_map(|frame| frame.data_ref()).map(|data| data.len() as u64).sum();
        let mut hint = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        let (lower, upper) = (hint.lower() + read, hint.upper().map(|upper| upper + read));
        if let Some(upper) = upper {
            hint.set_upper(upper);
        }
        hint.set_lower(lower);
        hint
    }
}

impl<B> fmt::Debug for Body<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body").field("read", &self.read.len()).field("rest", &self.rest.is_some()).finish()
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
    let mut read = VecDeque::new();
    let mut bytes = 0;
    loop {
        let frame = match give_up_at {
            None => rest.frame().await,
            Some(at) => match timeout_at(at, rest.frame()).await {
                Ok(frame) => frame,
                Err(_) => return Ok(Read::Unfinished(Body { read, rest: Some(rest) })),
            },
        };
        let Some(frame) = frame.transpose()? else { return Ok(whole(read)) };
        bytes += frame.data_ref().map_or(0, Bytes::len);
        read.push_back(frame);
        if bytes > limit.bytes {
            return Ok(Read::Unfinished(Body { read, rest: Some(rest) }));
        }
    }
}

fn whole<B>(frames: VecDeque<Frame<Bytes>>) -> Read<B> {
    let mut trailers = None;
    let mut chunks = Vec::with_capacity(frames.len());
    for frame in frames {
        match frame.into_data() {
            Ok(data) => chunks.push(data),
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    // One chunk, as nearly all responses are, is not copied.
    let data = if chunks.len() == 1 {
        chunks.swap_remove(0)
    } else {
        let mut joined = BytesMut::with_capacity(chunks.iter().map(Bytes::len).sum());
        chunks.iter().for_each(|chunk| joined.extend_from_slice(chunk));
        joined.freeze()
    };
    Read::Whole { data, trailers }
}
