//! Stores a response in a record, and reads it from there as a replay. A record keeps the response, or a reference from
//! which a replay rebuilds the answer.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderName, HeaderValue, Method, Response, StatusCode, header, response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;
use tokio::time::Instant;

use super::body::{LayerBody, has_no_body};
use super::rejection::{Mistake, Rejection};
use super::request::{IDEMPOTENCY_KEY, as_text, headers_of};
use crate::outcome::{Response as Stored, to_json, unquoted};
use crate::{BoxError, Error};

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

/// The text that is stored instead of the headers. A list of headers is a JSON array, so it never equals this text.
const IS_REFERENCE: &str = "\"reference\"";

/// A reference to the answer, which the record keeps instead of the headers and the body. The first client gets the
/// response as the handler made it. A retry gets the answer that the layer's [`Replay`](super::Replay) makes from the
/// reference. If a transactional layer could not replay the reference, the layer undoes everything and answers 500.
///
/// With axum, write `(StatusCode::CREATED, AnswerBy(order.id), Json(order))`. If a reference has no JSON form, the
/// response is a 500. The guide's page `by_reference` has examples.
#[derive(Clone, Debug)]
pub struct AnswerBy<T>(pub T);

/// The handler's reference, in the extensions of the response. This type has no parameter, so the layer finds a
/// reference of any type, and does not store the body.
#[derive(Clone)]
pub(super) struct Reference(Vec<u8>);

impl<T: Serialize> AnswerBy<T> {
    /// Puts the reference into the extensions of a response, without axum.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] if the reference has no JSON form. The handler must then answer with an error.
    pub fn put_into(&self, extensions: &mut Extensions) -> Result<(), Error> {
        extensions.insert(Reference(to_json(&self.0)?));
        Ok(())
    }
}

#[cfg(feature = "axum")]
impl<T: Serialize> axum::response::IntoResponseParts for AnswerBy<T> {
    type Error = StatusCode;

    fn into_response_parts(
        self,
        mut response: axum::response::ResponseParts,
    ) -> Result<axum::response::ResponseParts, StatusCode> {
        self.put_into(response.extensions_mut()).map_err(|error| {
            tracing::error!(error = &error as &dyn std::error::Error, "a reference has no JSON form");
            StatusCode::INTERNAL_SERVER_ERROR
        })?;
        Ok(response)
    }
}

impl Reference {
    /// Returns an error if a replay could not read this reference.
    pub(super) fn check(&self, replay: Option<&dyn Rebuild>) -> Result<(), Rejection> {
        replay.ok_or(Mistake::NoReplay)?.check(&self.0)
    }

    /// Returns the record of the response. If the reference is larger than the layer's limit of a stored response, the
    /// record has only the status.
    pub(super) fn into_record(self, status: StatusCode, limit: usize) -> Stored {
        // A `StatusCode` is at most 999.
        let status = Some(status.as_u16().cast_signed());
        if self.0.len() > limit {
            return Stored { status, headers: None, body: None };
        }
        Stored { status, headers: Some(IS_REFERENCE.to_owned()), body: Some(self.0) }
    }

    /// Reads the status and the reference. `None` if the record has no reference, or is damaged.
    pub(super) fn of(stored: &Stored) -> Option<(StatusCode, &[u8])> {
        let status = StatusCode::from_u16(stored.status?.cast_unsigned()).ok()?;
        let reference = stored.body.as_deref()?;
        (stored.headers.as_deref() == Some(IS_REFERENCE)).then_some((status, reference))
    }
}

/// Rebuilds the answer to a retry from the stored reference, for the setting
/// [`replay`](super::IdempotencyLayer::replay).
pub trait Replay: Send + Sync + 'static {
    /// The type of the handlers' [`AnswerBy`](super::AnswerBy). Later versions of this type must decode older values.
    type Reference: DeserializeOwned + Send;
    /// The body of the answer, of up to 64 MiB. The layer reads the body to its end before the transaction ends.
    type Body: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send;

    /// Rebuilds the answer. `request` is the retry, and its extensions contain the [`Key`](crate::Key). The connection
    /// is in a read-only transaction of its own, which is rolled back.
    ///
    /// - A response below 400 gets the status of the first answer, and `Idempotent-Replayed: true`. The headers of such
    ///   a response are sent unchanged, except `Content-Length` and `Transfer-Encoding`, which the server computes.
    /// - Any other response is sent as it is, for example a 403 for an account that may no longer see the order.
    /// - Return `None` for a reference that does not resolve any more. The answer is then a 410
    ///   [`gone`](Rejection::Gone).
    ///
    /// # Errors
    ///
    /// After a transient error, the answer is a 503, and the client retries. Any other error makes the answer a 500. A
    /// panic is treated like a panic of the handler. [`run_timeout`](super::IdempotencyLayer::run_timeout) limits the
    /// time. The handler does not run, even if `replay` fails.
    fn replay(
        &self,
        reference: Self::Reference,
        request: &Parts,
        conn: &mut PgConnection,
    ) -> impl Future<Output = Result<Option<Response<Self::Body>>, Error>> + Send;
}

type Rebuilding<'r> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, Rejection>> + Send + 'r>>;

pub(super) trait Rebuild: Send + Sync {
    fn check(&self, reference: &[u8]) -> Result<(), Rejection>;

    /// Rebuilds the answer. Fails if its body has more than `most` bytes, or is not complete at the time `end`.
    fn rebuild<'r>(
        &'r self,
        reference: &'r [u8],
        request: &'r Parts,
        conn: &'r mut PgConnection,
        most: usize,
        end: Instant,
    ) -> Rebuilding<'r>;
}

fn decoded<T: DeserializeOwned>(reference: &[u8]) -> Result<T, Rejection> {
    serde_json::from_slice(reference).map_err(|error| {
        let source = unquoted(&error).into();
        Rejection::misconfigured(Error::Undecodable { step: None, source })
    })
}

impl<R: Replay> Rebuild for R {
    fn check(&self, reference: &[u8]) -> Result<(), Rejection> {
        decoded::<R::Reference>(reference).map(drop)
    }

    fn rebuild<'r>(
        &'r self,
        reference: &'r [u8],
        request: &'r Parts,
        conn: &'r mut PgConnection,
        most: usize,
        end: Instant,
    ) -> Rebuilding<'r> {
        Box::pin(async move {
            let reference = decoded(reference)?;
            let rebuilt = self.replay(reference, request, conn).await.map_err(|error| {
                // If `replay` writes, every retry fails again, because the layer's transaction is read only on every
                // primary.
                match error.is_transient() && !error.is_write_in_read_only() {
                    true => Rejection::Unavailable(Arc::new(error)),
                    false => Rejection::misconfigured(error),
                }
            })?;
            let (mut parts, body) = rebuilt.ok_or(Rejection::Gone)?.into_parts();
            let empty = has_no_body(request.method == Method::HEAD, parts.status);
            let read = LayerBody::of_response(body, &mut parts.headers, empty, most, end).await;
            let read = read.map_err(|broken| broken.to_string());
            let whole = read.and_then(|body| {
                body.as_whole().cloned().ok_or_else(|| format!("it has more than {most} bytes, or took too long"))
            });
            Ok(Response::from_parts(parts, whole.map_err(Mistake::BrokenResponse)?))
        })
    }
}
