//! Stores a response in a record, and reads it from there as a replay.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header, response};

use super::body::LayerBody;
use super::rejection::Rejection;
use super::request::{IDEMPOTENCY_KEY, as_text, headers_of};
use crate::outcome::StoredResponse;

/// The header `Idempotent-Replayed`, which is `true` on every replay, and absent from every other response. Stripe and
/// the agentic-commerce protocol use the same name.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The headers that describe the result: its bytes, how a client has to treat them, and where the result is. A replay
/// repeats these headers by default, because its client needs them as the first client did. `Retry-After` describes the
/// result of a 202 only ([`describes`]).
///
/// Other headers answer something that a retry does not share with the first request. `Access-Control-Allow-Origin`
/// answers the `Origin` of one request, and `Preference-Applied` answers its `Prefer`. `Alt-Svc` is about the
/// connection. `RateLimit` and `X-Request-Id` are about the moment. An outer layer adds such headers to a replay, too.
#[rustfmt::skip]
const DESCRIBING: [HeaderName; 21] = [
    header::ALLOW, header::CACHE_CONTROL, header::CONTENT_DISPOSITION, header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE, header::CONTENT_LOCATION, header::CONTENT_RANGE, header::CONTENT_SECURITY_POLICY,
    header::CONTENT_TYPE, header::ETAG, header::EXPIRES, header::LAST_MODIFIED, header::LINK, header::LOCATION,
    header::REFERRER_POLICY, header::VARY, header::X_CONTENT_TYPE_OPTIONS, header::X_FRAME_OPTIONS,
    // RFC 9530: a replay has the same bytes.
    HeaderName::from_static("content-digest"), HeaderName::from_static("repr-digest"),
    // The URL under which a client asks for the state of a long operation.
    HeaderName::from_static("operation-location"),
];

/// The beginning of the headers of htmx. These headers tell the page of the client what the result is: `HX-Redirect` is
/// the `Location` of htmx.
const OF_HTMX: &str = "hx-";

/// Whether this header describes the result of a response with this status. On a 202, `Retry-After` is the time after
/// which to ask for the result. On any other response, `Retry-After` is about the moment.
fn describes(name: &HeaderName, status: StatusCode) -> bool {
    DESCRIBING.contains(name)
        || name.as_str().starts_with(OF_HTMX)
        || *name == header::RETRY_AFTER && status == StatusCode::ACCEPTED
}

/// The headers that [`replay_header`](super::IdempotencyLayer::replay_header) and the SQL function
/// `idempotency.complete` refuse. Each of these headers contains the session or the challenge of the first request,
/// belongs to one connection (RFC 9110, section 7.6.1), or is computed for each response by the server or the layer.
#[rustfmt::skip]
pub(super) const NEVER_REPLAYED: [HeaderName; 17] = [
    header::AUTHORIZATION, header::CONNECTION, header::CONTENT_LENGTH, header::DATE, header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION, header::SET_COOKIE, header::TE, header::TRAILER, header::TRANSFER_ENCODING,
    header::UPGRADE, header::WWW_AUTHENTICATE,
    HeaderName::from_static("authentication-info"), HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"), IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED,
];

/// Returns the record of a response. The record has the body and the headers of a replay, unless the body must not be
/// stored. `also` are headers that the service has named.
pub(super) fn to_record(parts: &response::Parts, body: Option<Vec<u8>>, also: &[HeaderName]) -> StoredResponse {
    // A `StatusCode` is at most 999.
    let status = Some(parts.status.as_u16().cast_signed());
    let Some(body) = body else { return StoredResponse { status, headers: None, body: None } };
    let kept = parts.headers.iter().filter(|(name, _)| describes(name, parts.status) || also.contains(name));
    let headers: Vec<_> = kept.map(|(name, value)| (name.as_str(), as_text(value.as_bytes()))).collect();
    // Pairs of strings always have a JSON form.
    StoredResponse { status, headers: serde_json::to_string(&headers).ok(), body: Some(body) }
}

pub(super) fn replay<B>(stored: StoredResponse) -> Result<Response<LayerBody<B>>, Rejection> {
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

#[cfg(test)]
#[path = "../../tests/unit/http/replay.rs"]
mod tests;
