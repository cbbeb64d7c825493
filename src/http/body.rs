//! Reads the bodies of requests and responses up to a limit, or passes them on. Another limit is for the bytes that all
//! requests of a layer keep in memory.

use std::collections::HashMap;
use std::error::Error;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io, iter};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, LengthLimitError};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use crate::BoxError;

/// An upload may take this time, and one millisecond more for each `UPLOAD_PACE` bytes. A bad mobile connection has
/// this pace. Without this limit, uploads that never end would keep their bytes in memory.
const UPLOAD_TIME: Duration = Duration::from_secs(30);
const UPLOAD_PACE: u64 = 16;

/// How many frames of a body are read between two looks at the time and at the limits, unless a frame is not ready. A
/// body may exceed a limit by this many bytes and one frame before the layer notices it.
const FRAMES_TOGETHER: usize = 64;
const BYTES_TOGETHER: usize = 1024;

pub(super) trait ByteBody: http_body::Body<Data = Bytes, Error: Into<BoxError>> {}

impl<B: http_body::Body<Data = Bytes, Error: Into<BoxError>>> ByteBody for B {}

/// The body of a request or a response that went through the layer. The body consists of the bytes that the layer has
/// read, and then of the rest of the original body.
pub struct LayerBody<B> {
    data: Bytes,
    /// The trailers of a response, which are sent and not stored.
    trailers: Option<HeaderMap>,
    /// The count of the bytes in `data`, if this is the body of a request.
    hold: Option<Hold>,
    rest: Option<Pin<Box<B>>>,
}

impl<B> LayerBody<B> {
    pub(super) fn untouched(body: B) -> Self {
        Self { data: Bytes::new(), trailers: None, hold: None, rest: Some(Box::pin(body)) }
    }

    pub(super) fn whole(data: Bytes) -> Self {
        Self { data, trailers: None, hold: None, rest: None }
    }

    pub(super) fn data(&self) -> &Bytes {
        &self.data
    }

    pub(super) fn as_whole(&self) -> Option<&Bytes> {
        self.rest.is_none().then_some(&self.data)
    }
}

pub(super) enum Unread<B> {
    Broken(Broken),
    TooLarge(LayerBody<B>),
    NoRoom(LayerBody<B>),
    /// The requests of the same scope hold too many bytes.
    NoRoomInShare(LayerBody<B>),
}

impl<B: http_body::Body<Data = Bytes, Error: Into<BoxError>>> LayerBody<B> {
    /// Reads the body of a request to its end. A body that announces a length over the limit is not read. Trailers are
    /// dropped, because neither the fingerprint nor a stored request contains them.
    pub(super) async fn of_request(body: B, limit: usize, mut hold: Hold) -> Result<Self, Unread<B>> {
        let announced = body.size_hint().lower();
        let arrived = Instant::now();
        let mut body = Self::untouched(body);
        loop {
            if body.data.len().max(usize::try_from(announced).unwrap_or(usize::MAX)) > limit {
                return Err(Unread::TooLarge(body));
            }
            match hold.grow_to(body.data.len()) {
                Room::Held => {}
                Room::Full => return Err(Unread::NoRoom(body)),
                Room::ShareFull => return Err(Unread::NoRoomInShare(body)),
            }
            // The bytes before the end of the body count, too.
            if body.rest.is_none() {
                break;
            }
            let due = arrived + UPLOAD_TIME + Duration::from_millis(body.data.len() as u64 / UPLOAD_PACE);
            if !body.read_until(announced, due).await.map_err(Unread::Broken)? {
                return Err(Unread::Broken(Broken::TooSlow));
            }
        }
        body.trailers = None;
        body.hold = Some(hold);
        // Over HTTP/2, the body of a request that its client has reset may end as if it were whole. A reset with the
        // code `NO_ERROR` has this effect, and some proxies turn every reset into a `NO_ERROR`. Up to hyper 1.9, a
        // reset with the code `CANCEL` also has this effect. An outer layer may already have collected such a body. The
        // HTTP server drops the future of such a request when the future next waits, so the future waits here once.
        yield_now().await;
        Ok(body)
    }

    /// Reads the body of a response. Stops at the end of the body, at the deadline, or after more bytes than the limit.
    /// After the deadline, a body counts as a stream that may never end. A body that announces a length over the limit
    /// is not read. If `empty`, the response has no body, whatever length it announces.
    ///
    /// If the body is whole, the `headers` no longer say where the body ends, so the server computes this again.
    pub(super) async fn of_response(
        body: B,
        headers: &mut HeaderMap,
        empty: bool,
        limit: usize,
        deadline: Instant,
    ) -> Result<Self, Broken> {
        let announced = if empty { 0 } else { body.size_hint().lower() };
        let mut body = Self::untouched(body);
        while announced <= limit as u64
            && body.rest.is_some()
            && body.data.len() <= limit
            && body.read_until(announced, deadline).await?
        {}
        if let Some(data) = body.as_whole().filter(|_| !empty) {
            unframe(headers, data.len())?;
        }
        Ok(body)
    }

    /// Reads the frames that are ready, up to a bound. Returns `false` if no frame came before the deadline.
    async fn read_until(&mut self, announced: u64, deadline: Instant) -> Result<bool, Broken> {
        // The time-out alone would not end a body that always has a frame ready.
        if Instant::now() >= deadline {
            return Ok(false);
        }
        let read = timeout_at(deadline, self.read(announced)).await;
        read.map_or(Ok(false), |read| read.map(|()| true))
    }

    /// Waits for a frame, and reads it together with the frames that are ready behind it. For a body that arrives byte
    /// by byte, a time-out and a look at the limits for each frame would take longer than the bytes themselves.
    async fn read(&mut self, announced: u64) -> Result<(), Broken> {
        let mut frames = 0;
        // The chunks are joined in a buffer that grows. If a body arrives byte by byte, a list of its chunks would take
        // a hundred times its size.
        let mut more = BytesMut::new();
        let read = poll_fn(|context| {
            while let Some(rest) = &mut self.rest
                && frames < FRAMES_TOGETHER
                && more.len() < BYTES_TOGETHER
            {
                let frame = match rest.as_mut().poll_frame(context) {
                    Poll::Ready(frame) => frame.transpose().map_err(|error| Broken::Failed(error.into()))?,
                    Poll::Pending if frames == 0 => return Poll::Pending,
                    Poll::Pending => break,
                };
                frames += 1;
                match frame.map(Frame::into_data) {
                    Some(Ok(chunk)) if self.data.is_empty() => {
                        self.data = chunk;
                        // The first chunk is often the whole body, and is then not copied.
                        break;
                    }
                    Some(Ok(chunk)) => more.extend_from_slice(&chunk),
                    Some(Err(frame)) => self.trailers = frame.into_trailers().ok(),
                    // This check uses the length that the body announced at its beginning, as hyper does. In some
                    // bodies, the length that is announced later still includes the bytes that were already delivered.
                    None if announced > (self.data.len() + more.len()) as u64 => {
                        return Poll::Ready(Err(Broken::CutOff));
                    }
                    None => self.rest = None,
                }
            }
            Poll::Ready(Ok(()))
        })
        .await;
        if !more.is_empty() {
            let mut joined = BytesMut::from(std::mem::take(&mut self.data));
            joined.extend_from_slice(&more);
            self.data = joined.freeze();
        }
        read
    }

    /// Whether nothing was read yet. If nothing was read, a client that [waits for
    /// `100 Continue`](http::header::EXPECT) has sent nothing.
    pub(super) fn is_unread(&self) -> bool {
        self.data.is_empty() && self.rest.is_some()
    }

    /// Reads the rest of the body and throws it away. Stops after `time`, or after about `most` bytes. A body that
    /// announces more than `most` bytes is not read.
    pub(super) async fn discard(self, most: usize, time: Duration) {
        drop(self.data);
        let Some(mut rest) = self.rest.filter(|rest| rest.size_hint().lower() <= most as u64) else { return };
        let reading = async {
            let mut read = 0;
            while read <= most
                && let Some(Ok(frame)) = rest.frame().await
            {
                // An empty frame counts as one byte, because otherwise a body of empty frames would have no end.
                read += frame.data_ref().map_or(1, |data| data.len().max(1));
            }
        };
        let _ = timeout(time, reading).await;
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
            self.hold = None;
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
        // If the size is exact, hyper sends a `Content-Length` over HTTP/1.1, and does not send the trailers.
        let unknown = self.trailers.is_some();
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(read));
        if let Some(upper) = rest.upper().filter(|_| !unknown) {
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

#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("{0}")]
    Failed(BoxError),
    #[error("the body ended before its announced length")]
    CutOff,
    #[error("the body came too slowly")]
    TooSlow,
}

impl Broken {
    /// Whether the body is over a limit of an outer layer.
    pub(super) fn is_over_a_limit(&self) -> bool {
        self.causes().any(|cause| cause.is::<LengthLimitError>())
    }

    /// Whether a decoder refused the bytes of the body, so that the same bytes would fail again. For such bytes,
    /// decoders return `InvalidData`, `InvalidInput` or `Other`. For missing bytes, decoders return `UnexpectedEof`,
    /// and a retry may succeed.
    pub(super) fn is_final(&self) -> bool {
        let errors = self.causes().filter_map(|cause| cause.downcast_ref::<io::Error>());
        let mut kinds = errors.map(io::Error::kind).peekable();
        kinds.peek().is_some()
            && kinds.all(|kind| {
                matches!(kind, io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::Other)
            })
    }

    fn causes(&self) -> impl Iterator<Item = &(dyn Error + 'static)> {
        let first = match self {
            Self::Failed(error) => Some(&**error as &(dyn Error + 'static)),
            Self::CutOff | Self::TooSlow => None,
        };
        iter::successors(first, |cause| cause_of(*cause))
    }
}

fn cause_of<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e (dyn Error + 'static)> {
    match error.downcast_ref::<io::Error>() {
        // `io::Error::source` skips the inner error, and returns the source of the inner error.
        Some(error) => error.get_ref().map(|inner| inner as &(dyn Error + 'static)),
        None => error.source(),
    }
}

/// Whether a response has no body. Its headers may nevertheless announce the length of a body (RFC 9110, section 8.6).
pub(super) fn has_no_body(to_head: bool, status: StatusCode) -> bool {
    to_head || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

/// Removes the headers that frame a body from the head of a response whose body is whole. Fails if the headers announce
/// a longer body.
///
/// While the length of a body is unknown, hyper frames the body by these headers. Once the layer has read the body, its
/// length is known. hyper then frames the body by this length, and also writes the headers, without a comparison. With
/// a `Content-Length` of another length, the client would take bytes of one response for a part of another response of
/// the connection, and a proxy shares the connection among its clients. With a `Transfer-Encoding`, axum adds a
/// `Content-Length`, and hyper refuses the two headers together and closes the connection.
fn unframe(headers: &mut HeaderMap, length: usize) -> Result<(), Broken> {
    let lines = headers.get_all(header::CONTENT_LENGTH).iter();
    let announced = lines.filter_map(|line| HeaderValue::to_str(line).ok()?.trim().parse::<u64>().ok());
    if announced.max() > Some(length as u64) {
        return Err(Broken::CutOff);
    }
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::TRANSFER_ENCODING);
    Ok(())
}

/// Counts the bytes of the requests that arrive or wait, for a layer and its clones. The limit on the number of runs
/// does not bound these requests, because a request gets the place of a run only after its body has arrived.
///
/// One account that stalls many uploads must not fill the memory or keep others from uploading. So the number of bytes
/// of a layer is bounded, and the requests of one scope may hold at most half of this number. The layer counts bytes
/// when they arrive, because a client can announce any length. A request that finds no room is refused at once, because
/// half-sent uploads that wait for each other would wait forever.
#[derive(Clone, Default)]
pub(super) struct HeldBytes(Arc<Mutex<Counts>>);

#[derive(Default)]
struct Counts {
    all: usize,
    of_scopes: HashMap<Option<Arc<str>>, usize>,
}

pub(super) struct Hold {
    held: HeldBytes,
    /// The scope of the request. All requests without a key share `None`.
    scope: Option<Arc<str>>,
    most: usize,
    bytes: usize,
}

impl HeldBytes {
    /// Begins to count the bytes of a request, for a layer that may hold `most` bytes.
    pub(super) fn hold(&self, scope: Option<&str>, most: usize) -> Hold {
        Hold { held: self.clone(), scope: scope.map(Arc::from), most, bytes: 0 }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Room {
    Held,
    Full,
    /// The requests of this scope would hold more than half of the bytes that the layer may hold.
    ShareFull,
}

impl Hold {
    /// Raises the number of bytes that the request holds to `bytes`, if there is room.
    fn grow_to(&mut self, bytes: usize) -> Room {
        let added = bytes.saturating_sub(self.bytes);
        let mut counts = self.held.counts();
        let of_scope = counts.of_scopes.get(&self.scope).copied().unwrap_or(0);
        if counts.all.saturating_add(added) > self.most {
            return Room::Full;
        }
        if of_scope.saturating_add(added) > self.most / 2 {
            return Room::ShareFull;
        }
        if added > 0 {
            counts.all += added;
            *counts.of_scopes.entry(self.scope.clone()).or_default() += added;
        }
        drop(counts);
        self.bytes += added;
        Room::Held
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut counts = self.held.counts();
        counts.all -= self.bytes;
        if let Some(of_scope) = counts.of_scopes.get_mut(&self.scope) {
            *of_scope -= self.bytes;
            if *of_scope == 0 {
                counts.of_scopes.remove(&self.scope);
            }
        }
    }
}
