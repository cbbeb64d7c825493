//! Stores a response in a record, and reads it from there as a replay.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header, response};

use super::body::LayerBody;
use super::rejection::Rejection;
use super::request::{IDEMPOTENCY_KEY, as_text, headers_of};
use crate::outcome::Response as Stored;

/// The header `Idempotent-Replayed`, which is `true` on every replay, and absent from every other response. Stripe and
/// the agentic-commerce protocol use the same name.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The headers that a replay repeats by default. A client needs these headers to read the body or to find resources.
#[rustfmt::skip]
pub(super) const REPLAYED: [HeaderName; 13] = [
    header::CACHE_CONTROL, header::CONTENT_DISPOSITION, header::CONTENT_ENCODING, header::CONTENT_LANGUAGE,
    header::CONTENT_LOCATION, header::CONTENT_RANGE, header::CONTENT_TYPE, header::ETAG, header::EXPIRES,
    header::LAST_MODIFIED, header::LINK, header::LOCATION, header::VARY,
];

/// The headers that no replay may repeat. Each of these headers contains the session or the challenge of the first
/// request, belongs to one connection (RFC 9110, section 7.6.1), or is computed for each response by the server or the
/// layer. The SQL function `idempotency.complete` refuses the same names.
#[rustfmt::skip]
pub(super) const NEVER_REPLAYED: [HeaderName; 17] = [
    header::AUTHORIZATION, header::CONNECTION, header::CONTENT_LENGTH, header::DATE, header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION, header::SET_COOKIE, header::TE, header::TRAILER, header::TRANSFER_ENCODING,
    header::UPGRADE, header::WWW_AUTHENTICATE,
    HeaderName::from_static("authentication-info"), HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"), IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED,
];

/// Returns the record of a response. The record has the headers and the body, unless the body must not be stored.
pub(super) fn to_record(parts: &response::Parts, body: Option<Vec<u8>>, replayed: &[HeaderName]) -> Stored {
    // A `StatusCode` is at most 999.
    let status = Some(parts.status.as_u16().cast_signed());
    let Some(body) = body else { return Stored { status, headers: None, body: None } };
    let kept = parts.headers.iter().filter(|(name, _)| replayed.contains(name));
    let headers: Vec<_> = kept.map(|(name, value)| (name.as_str(), as_text(value.as_bytes()))).collect();
    // Pairs of strings always have a JSON form.
    Stored { status, headers: serde_json::to_string(&headers).ok(), body: Some(body) }
}

pub(super) fn replay<B>(stored: Stored) -> Result<Response<LayerBody<B>>, Rejection> {
    let status = stored.status.and_then(|status| StatusCode::from_u16(status.cast_unsigned()).ok());
    let not_replayable = || Rejection::NotReplayable { status };
    let body = stored.body.ok_or_else(not_replayable)?;
    let mut response = Response::new(LayerBody::whole(Bytes::from(body)));
    match status.zip(stored.headers) {
        Some((status, headers)) => {
            *response.status_mut() = status;
            let headers = serde_json::from_str(&headers).ok().and_then(headers_of);
            *response.headers_mut() = headers.ok_or_else(not_replayable)?;
        }
        // An operator has resolved the operation with a JSON value.
        None => {
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
    }
    response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    Ok(response)
}
