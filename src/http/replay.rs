//! A response on its way into its record, and out of it again.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header, response};

use super::body::Body;
use super::rejection::Rejection;
use crate::record;

/// `Idempotency-Replayed`: `true` on every replay, on nothing else.
pub const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// What a replay repeats: what says how to read the body, and where things are. The last three are gRPC's.
pub(super) const REPLAYED: [HeaderName; 16] = [
    header::CACHE_CONTROL,
    header::CONTENT_DISPOSITION,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_LOCATION,
    header::CONTENT_RANGE,
    header::CONTENT_TYPE,
    header::ETAG,
    header::EXPIRES,
    header::LAST_MODIFIED,
    header::LINK,
    header::LOCATION,
    header::VARY,
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-message"),
    GRPC_STATUS,
];

/// What no replay may repeat: a session or a challenge of the first request's, what belongs to one connection (RFC 9110,
/// section 7.6.1), and what the server computes for each response.
const NEVER_REPLAYED: [HeaderName; 15] = [
    header::AUTHORIZATION,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::DATE,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::SET_COOKIE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::WWW_AUTHENTICATE,
    HeaderName::from_static("authentication-info"),
    HeaderName::from_static("keep-alive"),
    IDEMPOTENCY_REPLAYED,
];

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

pub(super) fn may_be_replayed(name: &HeaderName) -> bool {
    !NEVER_REPLAYED.contains(name)
}

/// Whether the status of the call may still come, in the trailers.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"application/grpc")) && !headers.contains_key(GRPC_STATUS)
}

/// A gRPC call that failed, although its HTTP status is 200.
pub(super) fn grpc_failed(fields: &HeaderMap) -> bool {
    fields.get(GRPC_STATUS).is_some_and(|status| status != "0")
}

/// The response with the body as it is to be stored, or without one that is not to be kept.
pub(super) fn stored(
    parts: &response::Parts,
    body: Option<(Vec<u8>, Option<&HeaderMap>)>,
    replayed: &[HeaderName],
) -> record::Response {
    // At most 999, by `StatusCode`.
    let status = Some(parts.status.as_u16().cast_signed());
    let Some((body, trailers)) = body else { return record::Response { status, headers: None, body: None } };
    let fields = |fields: &HeaderMap, place: Place| -> Vec<Field> {
        let kept = fields.iter().filter(|(name, _)| replayed.contains(name));
        kept.map(|(name, value)| Field(name.as_str().to_owned(), text_of(value), place)).collect()
    };
    let mut headers = fields(&parts.headers, Place::Header);
    headers.extend(trailers.into_iter().flat_map(|trailers| fields(trailers, Place::Trailer)));
    let headers: Vec<_> = headers.iter().map(Field::parts).collect();
    // Strings in lists: there is nothing in it that JSON could not hold.
    record::Response { status, headers: serde_json::to_string(&headers).ok(), body: Some(body) }
}

/// A response as a layer without further settings stores it.
#[cfg(feature = "testing")]
pub(crate) fn plain_response<R: AsRef<[u8]>>(response: &Response<R>) -> record::Response {
    let mut head = Response::new(());
    *head.status_mut() = response.status();
    *head.headers_mut() = response.headers().clone();
    stored(&head.into_parts().0, Some((response.body().as_ref().to_vec(), None)), &REPLAYED)
}

/// The stored response, with the body opened by `open` where it was sealed.
pub(super) fn replay<B>(
    stored: record::Response,
    open: impl FnOnce(Vec<u8>) -> Option<Vec<u8>>,
) -> Result<Response<Body<B>>, Rejection> {
    let status = stored.status.and_then(|status| StatusCode::from_u16(status.cast_unsigned()).ok());
    let not_replayable = Rejection::NotReplayable { status };
    let Some(body) = stored.body else { return Err(not_replayable) };
    let mut response = Response::new(());
    let mut trailers: Option<HeaderMap> = None;
    let body = match (status, stored.headers) {
        (Some(status), Some(fields)) => {
            *response.status_mut() = status;
            for Field(name, value, place) in fields_of(&fields).ok_or(not_replayable.clone())? {
                let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value_of(&value)) else {
                    return Err(not_replayable);
                };
                match place {
                    Place::Header => response.headers_mut().append(name, value),
                    Place::Trailer => trailers.get_or_insert_default().append(name, value),
                };
            }
            open(body).ok_or(not_replayable)?
        }
        // Settled by an operator's `resolve`, who has JSON.
        _ => {
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            body
        }
    };
    response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    Ok(response.map(|()| Body::whole(Bytes::from(body), trailers)))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Header,
    Trailer,
}

/// `[name, value]`, and `[name, value, "trailer"]` for what came after the body.
#[derive(Debug, PartialEq, Eq)]
struct Field(String, String, Place);

impl Field {
    fn parts(&self) -> Vec<&str> {
        let mut parts = vec![&*self.0, &*self.1];
        if self.2 == Place::Trailer {
            parts.push("trailer");
        }
        parts
    }
}

fn fields_of(json: &str) -> Option<Vec<Field>> {
    let fields: Vec<Vec<String>> = serde_json::from_str(json).ok()?;
    fields
        .into_iter()
        .map(|field| {
            let mut parts = field.into_iter();
            let (name, value) = (parts.next()?, parts.next()?);
            let place = if parts.next().is_some() { Place::Trailer } else { Place::Header };
            Some(Field(name, value, place))
        })
        .collect()
}

/// A byte for a character, as ISO 8859-1 has it: a value may hold any byte from 0x80, and JSON only Unicode.
fn text_of(value: &HeaderValue) -> String {
    value.as_bytes().iter().copied().map(char::from).collect()
}

fn value_of(text: &str) -> Result<HeaderValue, ()> {
    let bytes: Result<Vec<u8>, _> = text.chars().map(u8::try_from).collect();
    HeaderValue::from_bytes(&bytes.map_err(drop)?).map_err(drop)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use proptest::prelude::*;

    use super::*;

    type Nothing = http_body_util::Empty<Bytes>;

    fn any_fields() -> impl Strategy<Value = HeaderMap> {
        let byte = prop_oneof![Just(b'\t'), b' '..=b'~', 0x80_u8..=0xff];
        let field = (0..REPLAYED.len(), proptest::collection::vec(byte, 0..12));
        proptest::collection::vec(field, 0..8).prop_map(|fields| {
            let mut map = HeaderMap::new();
            for (name, value) in fields {
                map.append(&REPLAYED[name], HeaderValue::from_bytes(&value).expect("what HTTP lets through"));
            }
            map
        })
    }

    proptest! {
        /// Any status, allowed headers with any bytes, several of one name, trailers, any body: there and back.
        #[test]
        fn what_is_stored_comes_back(
            status in 100_u16..1000,
            headers in any_fields(),
            trailers in proptest::option::of(any_fields()),
            body in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let (mut parts, ()) = Response::new(()).into_parts();
            (parts.status, parts.headers) = (StatusCode::from_u16(status).expect("a status"), headers.clone());
            parts.headers.insert(header::SET_COOKIE, HeaderValue::from_static("session=1"));
            let stored = stored(&parts, Some((body.clone(), trailers.as_ref())), &REPLAYED);

            let (mut parts, replayed) = replay::<Nothing>(stored, Some).expect("replayable").into_parts();
            prop_assert_eq!(parts.status.as_u16(), status);
            prop_assert_eq!(parts.headers.remove(IDEMPOTENCY_REPLAYED).expect("told"), "true");
            prop_assert_eq!(parts.headers, headers);
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let replayed = runtime.block_on(replayed.collect()).expect("no error");
            prop_assert_eq!(replayed.trailers().cloned(), trailers.filter(|trailers| !trailers.is_empty()));
            prop_assert_eq!(replayed.to_bytes(), body);
        }

        /// Any text in the column, as a newer release or a hand may have left it: an answer, and no panic.
        #[test]
        fn any_headers_make_an_answer(headers in "\\PC{0,40}", status in any::<i16>(), body in any::<Option<Vec<u8>>>()) {
            let _ = replay::<Nothing>(record::Response { status: Some(status), headers: Some(headers), body }, Some);
        }
    }
}
