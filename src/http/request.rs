//! Which requests the layer covers, and the ticket of each: its key, its fingerprint and what to store of it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderName, Request, header};

use super::body::{LayerBody, Unread};
use super::handler::NoResponse;
use super::idempotent_tx::is_lent;
use super::key_header::{MalformedKey, key_value, only_line};
use super::layer::{IdempotencyLayer, LayerMode};
use super::not_begun::Loan;
use super::rejection::{Misconfigured, Rejection};
use super::stored_request::to_store;
use crate::key::{checked, checked_recorded};
use crate::record::Candidate;
use crate::{BoxError, Fingerprint, InvalidKey, Key, KeyPart};

/// `traceparent`, of W3C Trace Context. Several lines are invalid.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// How much of a body that is too large is read and thrown away, in limits. A client that sends more is not one that
/// has misjudged the limit.
const DISCARDED: usize = 8;
/// The longest time for this. A client that needs longer waits for an answer that it could have now.
const DISCARD_TIME: Duration = Duration::from_secs(10);

/// How the layer treats a request.
pub(super) enum Admission<B> {
    /// The layer does not cover the request's method, or a resumer has claimed the request's key.
    NotCovered(Request<LayerBody<B>>),
    /// The request is performed once, or, without a ticket, each time it comes.
    Covered { ticket: Option<Ticket>, request: Request<LayerBody<B>> },
}

/// What a run needs of its request.
pub(super) struct Ticket {
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    /// How long to wait for another request with the key. Zero: not at all.
    pub(super) wait: Duration,
    /// A record is judged as of this moment.
    pub(super) arrived: Instant,
    /// What the claim stores, so that a resumer can finish the request.
    pub(super) stored: Option<Vec<u8>>,
}

/// Reads the request and makes its ticket. Nothing is claimed yet, so a slow or broken upload costs no connection.
pub(super) async fn admit<B, E>(
    layer: &IdempotencyLayer,
    operation: Option<&str>,
    request: Request<B>,
) -> Result<Admission<B>, NoResponse<E>>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    let arrived = Instant::now();
    if !layer.methods.contains(request.method()) {
        return Ok(Admission::NotCovered(request.map(LayerBody::untouched)));
    }
    // A layer in front holds a key or a transaction for this request: the claim would wait for it, or commit without
    // it. The key of a resumed request is this layer's own, and its record exists.
    let is_resumed = matches!(layer.mode, LayerMode::Leased(_)) && request.extensions().get::<Resumed>().is_some();
    if !is_resumed && (request.extensions().get::<Key>().is_some() || is_lent(request.extensions())) {
        return Err(Misconfigured::CoveredTwice.into());
    }
    let check = if is_resumed { checked_recorded } else { checked };
    let from_header = layer.key_from.is_none().then(|| key_value(request.headers(), check));
    if matches!(from_header, Some(Ok(None))) && !layer.key_required {
        let (parts, body) = request.into_parts();
        let (_, body) = read(layer, None, &parts, body).await?;
        return Ok(Admission::Covered { ticket: None, request: Request::from_parts(parts, body) });
    }
    let (mut parts, body) = request.into_parts();
    // Before any complaint about the key: a client without access gets the scope's answer.
    let scope = (layer.scope)(&parts).map_err(NoResponse::Denied)?;
    let from_header = from_header.transpose()?;
    if from_header == Some(None) {
        return Err(Rejection::MissingKey.into());
    }
    let operation = operation.ok_or(Misconfigured::NoOperation)?;

    let (data, body) = read(layer, Some(&scope), &parts, body).await?;
    let value = match &layer.key_from {
        None => from_header.flatten(),
        Some(value) => value(&parts, &data).map_err(NoResponse::Denied)?,
    };
    let ticket = match value {
        // A stored key is resumed, however short it is.
        Some(value) if !is_resumed && value.chars().count() < layer.shortest_key => {
            return Err(Rejection::from(MalformedKey::TooShort { shortest: layer.shortest_key }).into());
        }
        Some(value) => {
            let trace = only_line(&parts.headers, &TRACEPARENT).and_then(|line| line.to_str().ok());
            let key =
                if is_resumed { Key::recorded(scope, operation, value) } else { Key::new(scope, operation, value) };
            let key = key.map_err(invalid_key)?.with_trace(trace.unwrap_or_default());
            let is_leased = matches!(layer.mode, LayerMode::Leased(_));
            let resumed: Option<Resumed> = if is_leased { parts.extensions.remove() } else { None };
            if let Some(resumed) = &resumed {
                resumed.meets(&key)?;
            }
            if is_leased && is_under_lease(&parts.extensions, &key) {
                return Ok(Admission::NotCovered(Request::from_parts(parts, body)));
            }
            let fingerprint = layer.fingerprint.fingerprint(&parts, &data).map_err(Rejection::InvalidBody)?;
            let wait = layer.mode.wait();
            let stored = match layer.mode {
                LayerMode::Leased(options) if options.stores_requests() => {
                    let of_fingerprint = &layer.fingerprint.headers;
                    let kept = |name: &_| layer.stored_headers.contains(name) || of_fingerprint.contains(name);
                    Some(to_store(&parts, &data, kept).map_err(|status| NoResponse::Denied(status.into()))?)
                }
                _ => None,
            };
            Some(Ticket { key, fingerprint, wait, arrived, stored })
        }
        None if layer.key_required => return Err(Rejection::MissingKey.into()),
        None => None,
    };
    Ok(Admission::Covered { ticket, request: Request::from_parts(parts, body) })
}

/// Reads a body to its end, so that no place and no connection waits for a slow upload.
async fn read<B>(
    layer: &IdempotencyLayer,
    scope: Option<&str>,
    parts: &Parts,
    body: B,
) -> Result<(Bytes, LayerBody<B>), Rejection>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    let limit = layer.request_limit;
    // A refusal would cost a resumed request one of its attempts.
    let resumed = parts.extensions.get::<Resumed>().is_some();
    let hold = layer.held.hold(scope, if resumed { usize::MAX } else { layer.most_held() });
    let (unread, rejection) = match LayerBody::of_request(body, limit, hold).await {
        Ok(body) => return Ok((body.data().clone(), body)),
        Err(Unread::Broken(broken)) => return Err(Rejection::of_body(&broken)),
        Err(Unread::TooLarge(body)) => (body, Rejection::BodyTooLarge { limit: Some(limit) }),
        Err(Unread::NoRoom(body)) => (body, Rejection::Overloaded { limit: layer.max_runs }),
    };
    // If the connection were closed while the client still writes, the client would see a reset in place of the answer.
    // But a client that waits for `100 Continue` sends the body only if somebody reads it.
    if !(parts.headers.contains_key(header::EXPECT) && unread.is_unread()) {
        unread.discard(limit.saturating_mul(DISCARDED), DISCARD_TIME).await;
    }
    Err(rejection)
}

fn invalid_key(invalid: InvalidKey) -> Rejection {
    match invalid.part() {
        // A part of the path, which the client has chosen, may be a part of the operation.
        KeyPart::Value | KeyPart::Operation => MalformedKey::from(invalid).into(),
        KeyPart::Scope => Misconfigured::Refused(invalid.into()).into(),
    }
}

/// The key of a resumed request. The layer that passes the request on takes it away.
#[derive(Clone)]
pub(super) struct Resumed {
    key: Key,
    /// The end of the retention before the claim.
    pub(super) expires_at: String,
    /// Why the layer that the request met last did not pass it on. The resumer reads it here, because something between
    /// the two may make another response of the layer's.
    mistake: Arc<Mutex<Option<String>>>,
}

impl Resumed {
    pub(super) fn of(found: Candidate) -> Self {
        Self { key: found.key, expires_at: found.expires_at, mistake: Arc::default() }
    }

    /// The layer has this key of the request. Under another one than that of the record the effect would have another
    /// downstream key, and happen twice.
    fn meets(&self, key: &Key) -> Result<(), Rejection> {
        let mistake = (self.key != *key).then(|| Misconfigured::ResumedUnderAnotherKey {
            recorded: self.key.operation().to_owned(),
            found: key.operation().to_owned(),
        });
        *self.mistake.lock().unwrap_or_else(PoisonError::into_inner) = mistake.as_ref().map(ToString::to_string);
        mistake.map_or(Ok(()), |mistake| Err(mistake.into()))
    }

    /// Why nothing was performed, if the request met another key.
    pub(super) fn mistake(&self) -> Option<String> {
        self.mistake.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Whether a resumer has claimed this key for the request. The layer would meet that claim.
fn is_under_lease(extensions: &Extensions, key: &Key) -> bool {
    Loan::of(extensions).is_some_and(|loan| loan.lease.key() == key && !loan.lease.is_lost())
}
