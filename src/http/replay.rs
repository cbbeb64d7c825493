//! Responses on their way into a record, and out of it again as replays.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header, response};

use super::body::LayerBody;
use super::key_header::IDEMPOTENCY_KEY;
use super::rejection::Rejection;
use crate::outcome::Response as Stored;

/// `Idempotent-Replayed`: `true` on every replay, absent from every other response. Stripe and the agentic-commerce
/// protocol use the same name.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// A replay repeats the headers that a client needs to read the body or to find things.
#[rustfmt::skip]
pub(super) const REPLAYED: [HeaderName; 13] = [
    header::CACHE_CONTROL, header::CONTENT_DISPOSITION, header::CONTENT_ENCODING, header::CONTENT_LANGUAGE,
    header::CONTENT_LOCATION, header::CONTENT_RANGE, header::CONTENT_TYPE, header::ETAG, header::EXPIRES,
    header::LAST_MODIFIED, header::LINK, header::LOCATION, header::VARY,
];

/// No replay may repeat the session or the challenge of the first request, the headers of one connection (RFC 9110,
/// section 7.6.1), or the headers that the server or the layer computes for each response. `idempotency.complete`
/// refuses the same names.
#[rustfmt::skip]
pub(super) const NEVER_REPLAYED: [HeaderName; 16] = [
    header::AUTHORIZATION, header::CONNECTION, header::CONTENT_LENGTH, header::DATE, header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION, header::SET_COOKIE, header::TE, header::TRAILER, header::TRANSFER_ENCODING,
    header::UPGRADE, header::WWW_AUTHENTICATE,
    HeaderName::from_static("authentication-info"), HeaderName::from_static("keep-alive"), IDEMPOTENCY_KEY,
    IDEMPOTENT_REPLAYED,
];

/// The record of a response, with its headers and its body, or without them if they are not to be stored.
pub(super) fn to_record(parts: &response::Parts, body: Option<Vec<u8>>, replayed: &[HeaderName]) -> Stored {
    // `StatusCode` is at most 999.
    let status = Some(parts.status.as_u16().cast_signed());
    let Some(body) = body else { return Stored { status, headers: None, body: None } };
    let kept = parts.headers.iter().filter(|(name, _)| replayed.contains(name));
    // One character for each byte, as in ISO 8859-1: a value may have any byte, and JSON only Unicode.
    let headers: Vec<(&str, String)> =
        kept.map(|(name, value)| (name.as_str(), value.as_bytes().iter().copied().map(char::from).collect())).collect();
    // Pairs of strings always have a JSON form.
    Stored { status, headers: serde_json::to_string(&headers).ok(), body: Some(body) }
}

/// The replay of a stored response.
pub(super) fn replay<B>(stored: Stored) -> Result<Response<LayerBody<B>>, Rejection> {
    let status = stored.status.and_then(|status| StatusCode::from_u16(status.cast_unsigned()).ok());
    let not_replayable = || Rejection::NotReplayable { status };
    let body = stored.body.ok_or_else(not_replayable)?;
    let mut response = Response::new(());
    response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    let Some((status, headers)) = status.zip(stored.headers) else {
        // An operator has resolved the operation with a JSON value.
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        return Ok(response.map(|()| LayerBody::whole(Bytes::from(body))));
    };
    *response.status_mut() = status;
    restore(&headers, response.headers_mut()).ok_or_else(not_replayable)?;
    Ok(response.map(|()| LayerBody::whole(Bytes::from(body))))
}

/// Adds the stored headers. `None` if the stored text is not what [`to_record`] writes.
fn restore(json: &str, headers: &mut HeaderMap) -> Option<()> {
    for (name, value) in serde_json::from_str::<Vec<(String, String)>>(json).ok()? {
        let value: Vec<u8> = value.chars().map(u8::try_from).collect::<Result<_, _>>().ok()?;
        headers.append(name.parse::<HeaderName>().ok()?, HeaderValue::from_bytes(&value).ok()?);
    }
    Some(())
}
