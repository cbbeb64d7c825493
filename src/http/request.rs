//! Which requests the layer covers, and which key they have.

use bytes::Bytes;
use http::Request;
use http::request::Parts;

use super::body::{LayerBody, Limit, Read, read};
use super::key_header::{MalformedKey, key_value};
use super::misconfigured::Misconfigured;
use super::rejection::Rejection;
use super::settings::{Denied, KeyFrom, OperationFrom, Settings};
use crate::{Fingerprint, Key, KeyPart};

/// How the layer treats a request.
pub(super) enum Admission<B> {
    /// The layer does not cover the request's method.
    NotCovered(Request<LayerBody<B>>),
    /// The request is performed once, or, without a ticket, each time it comes.
    Admitted { ticket: Option<Ticket>, request: Request<LayerBody<B>> },
}

/// The key and the fingerprint of a request.
pub(super) struct Ticket {
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
}

/// Why a request does not reach its handler.
pub(super) enum Refusal {
    Rejected(Rejection),
    /// A function of the service refused the request with a response of its own.
    Denied(Denied),
}

impl<R: Into<Rejection>> From<R> for Refusal {
    fn from(rejection: R) -> Self {
        Self::Rejected(rejection.into())
    }
}

/// Reads the request and makes its ticket. Nothing is claimed yet, so a slow or broken upload costs no connection.
pub(super) async fn admit<B>(settings: &Settings, request: Request<B>) -> Result<Admission<B>, Refusal>
where
    B: http_body::Body<Data = Bytes>,
{
    if !settings.methods.contains(request.method()) {
        return Ok(Admission::NotCovered(request.map(LayerBody::untouched)));
    }
    let (parts, body) = request.into_parts();
    let from_header = match settings.key {
        // An error is returned below: a client without access gets the scope's answer first.
        KeyFrom::Header { strict } => Some(key_value(&parts.headers, strict)),
        KeyFrom::Function(_) => None,
    };
    if matches!(from_header, Some(Ok(None))) && !settings.key_required {
        let request = Request::from_parts(parts, LayerBody::untouched(body));
        return Ok(Admission::Admitted { ticket: None, request });
    }
    let scope = (settings.scope)(&parts).map_err(Refusal::Denied)?;
    if matches!(from_header, Some(Ok(None))) {
        return Err(Rejection::MissingKey.into());
    }
    let from_header = from_header.transpose().map_err(Rejection::from)?.flatten();
    let operation = operation(settings, &parts)?;

    let limit = Limit { bytes: settings.request_limit, time: None };
    let (data, trailers) = match read(body, limit).await {
        Ok(Read::Whole { data, trailers }) => (data, trailers),
        Ok(Read::Unfinished(_)) => return Err(Rejection::BodyTooLarge { limit: limit.bytes }.into()),
        Err(_) => return Err(Rejection::BrokenBody.into()),
    };
    let value = match &settings.key {
        KeyFrom::Header { .. } => from_header,
        KeyFrom::Function(value) => value(&parts, &data).map_err(Refusal::Denied)?,
    };
    let ticket = match value {
        Some(value) => Some(ticket(settings, &parts, &data, scope, operation, value)?),
        None if settings.key_required => return Err(Rejection::MissingKey.into()),
        None => None,
    };
    Ok(Admission::Admitted { ticket, request: Request::from_parts(parts, LayerBody::whole(data, trailers)) })
}

fn ticket(
    settings: &Settings,
    parts: &Parts,
    data: &Bytes,
    scope: String,
    operation: String,
    value: String,
) -> Result<Ticket, Rejection> {
    if value.len() < settings.shortest_key {
        return Err(MalformedKey::TooShort { shortest: settings.shortest_key }.into());
    }
    let key = Key::new(scope, operation, value).map_err(|invalid| match invalid.part() {
        KeyPart::Value => Rejection::from(MalformedKey::from(invalid)),
        KeyPart::Scope | KeyPart::Operation => Misconfigured::Refused(invalid.into()).into(),
    })?;
    let fingerprint = settings.fingerprint.fingerprint(parts, data).map_err(Rejection::InvalidBody)?;
    Ok(Ticket { key, fingerprint })
}

fn operation(settings: &Settings, parts: &Parts) -> Result<String, Misconfigured> {
    let route = match &settings.operation {
        OperationFrom::Function(operation) => return operation(parts).ok_or(Misconfigured::NoOperation),
        OperationFrom::Route(route) => route,
        OperationFrom::MatchedRoute => matched_route(parts).ok_or(Misconfigured::NoOperation)?,
    };
    Ok(format!("{} {route}", parts.method))
}

#[cfg(feature = "axum")]
fn matched_route(parts: &Parts) -> Option<&str> {
    Some(parts.extensions.get::<axum::extract::MatchedPath>()?.as_str())
}

#[cfg(not(feature = "axum"))]
fn matched_route(_: &Parts) -> Option<&str> {
    None
}
