//! The request that a leased layer stores with its claim, and the same request for a resumer.

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, StatusCode, Uri, header};

use super::fingerprint_choice::{host_of_uri, target};
use super::key_header::IDEMPOTENCY_KEY;
use crate::lease::InDoubt;
use crate::record::ShownRequest;

/// What a handler needs to read the body, and the layer to know the key.
pub(super) const STORED: [HeaderName; 3] = [header::CONTENT_TYPE, header::CONTENT_ENCODING, IDEMPOTENCY_KEY];

/// They prove who the client is. The table, the WAL and backups keep no such proof.
pub(super) const NEVER_STORED: [HeaderName; 3] = [header::AUTHORIZATION, header::COOKIE, header::PROXY_AUTHORIZATION];

/// The request as it is stored, with these headers. An error is the response: the head is too large, or a request with
/// this target, such as one to open a tunnel, could not be restored. The limit of the body has been checked.
pub(super) fn to_store(
    parts: &Parts,
    body: &[u8],
    is_stored: impl Fn(&HeaderName) -> bool,
) -> Result<Vec<u8>, StatusCode> {
    let target = target(parts).into_owned();
    target.parse::<Uri>().map_err(|_| StatusCode::BAD_REQUEST)?;
    let sent = parts.headers.iter().map(|(name, value)| (name, value.as_bytes()));
    // A resumed request has only the path of the URI.
    let sent = sent.chain(host_of_uri(parts).map(|host| (&header::HOST, host.as_bytes())));
    let kept = sent.filter(|(name, _)| is_stored(name) && !NEVER_STORED.contains(name));
    // As in a stored response, one character for each byte.
    let kept = kept.map(|(name, value)| (name.to_string(), value.iter().copied().map(char::from).collect()));
    let request = ShownRequest::new(parts.method.to_string(), target, kept.collect());
    request.with_body(body).ok_or(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE)
}

/// `None` if the stored bytes are not what [`to_store`] writes.
pub(super) fn restored(stored: &[u8]) -> Option<Request<Bytes>> {
    let (head, body) = ShownRequest::read(stored)?;
    let mut request =
        Request::builder().method(&*head.method).uri(head.target).body(Bytes::copy_from_slice(body)).ok()?;
    for (name, value) in head.headers {
        let value: Vec<u8> = value.chars().map(u8::try_from).collect::<Result<_, _>>().ok()?;
        request.headers_mut().append(name.parse::<HeaderName>().ok()?, HeaderValue::from_bytes(&value).ok()?);
    }
    Some(request)
}

impl InDoubt {
    /// The stored request of a leased layer, with its body. `None` if the operation is not behind a layer, or
    /// its request is damaged or of a newer release.
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    #[must_use]
    pub fn http_request(&self) -> Option<Request<Bytes>> {
        restored(&self.request)
    }
}
