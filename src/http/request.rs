//! Which requests the layer covers, and which key they have.

use bytes::Bytes;
use http::Request;
use http::request::Parts;

use super::body::{LayerBody, Limit, Read, read};
use super::handler::Unanswered;
use super::key_header::{MalformedKey, key_value};
use super::rejection::{Misconfigured, Rejection};
use super::settings::{KeyFrom, OperationFrom, Settings};
use crate::{Fingerprint, InFlight, Key, KeyPart};

/// How the layer treats a request.
pub(super) enum Admission<B> {
    /// The layer does not cover the request's method.
    NotCovered(Request<LayerBody<B>>),
    /// The request is performed once, or, without a ticket, each time it comes.
    Covered { ticket: Option<Ticket>, request: Request<LayerBody<B>> },
}

/// What a run needs of its request.
pub(super) struct Ticket {
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    pub(super) in_flight: InFlight,
}

/// Reads the request and makes its ticket. Nothing is claimed yet, so a slow or broken upload costs no connection.
pub(super) async fn admit<B, E>(settings: &Settings, request: Request<B>) -> Result<Admission<B>, Unanswered<E>>
where
    B: http_body::Body<Data = Bytes>,
{
    if !settings.methods.contains(request.method()) {
        return Ok(Admission::NotCovered(request.map(LayerBody::untouched)));
    }
    let (parts, body) = request.into_parts();
    let from_header = match settings.key {
        KeyFrom::Function(_) => None,
        KeyFrom::Header { strict } => match key_value(&parts.headers, strict) {
            Ok(None) if !settings.key_required => {
                let request = Request::from_parts(parts, LayerBody::untouched(body));
                return Ok(Admission::Covered { ticket: None, request });
            }
            value => Some(value),
        },
    };
    // Before any complaint about the key: a client without access gets the scope's answer.
    let scope = (settings.scope)(&parts).map_err(Unanswered::Denied)?;
    let from_header = match from_header {
        Some(value) => Some(value.map_err(Rejection::from)?.ok_or(Rejection::MissingKey)?),
        None => None,
    };
    let operation = operation(settings, &parts)?;

    let limit = Limit { bytes: settings.request_limit, time: None };
    let (data, trailers) = match read(body, limit).await {
        Ok(Read::Whole { data, trailers }) => (data, trailers),
        Ok(Read::Unfinished(_)) => return Err(Rejection::BodyTooLarge { limit: limit.bytes }.into()),
        Err(_) => return Err(Rejection::BrokenBody.into()),
    };
    let value = match &settings.key {
        KeyFrom::Header { .. } => from_header,
        KeyFrom::Function(value) => value(&parts, &data).map_err(Unanswered::Denied)?,
    };
    let ticket = match value {
        Some(value) => {
            let key = key(settings, scope, operation, value)?;
            let fingerprint = settings.fingerprint.fingerprint(&parts, &data).map_err(Rejection::InvalidBody)?;
            Some(Ticket { key, fingerprint, in_flight: settings.in_flight })
        }
        None if settings.key_required => return Err(Rejection::MissingKey.into()),
        None => None,
    };
    Ok(Admission::Covered { ticket, request: Request::from_parts(parts, LayerBody::whole(data, trailers)) })
}

fn key(settings: &Settings, scope: String, operation: String, value: String) -> Result<Key, Rejection> {
    if value.len() < settings.shortest_key {
        return Err(MalformedKey::TooShort { shortest: settings.shortest_key }.into());
    }
    Key::new(scope, operation, value).map_err(|invalid| match invalid.part() {
        KeyPart::Value => MalformedKey::from(invalid).into(),
        KeyPart::Scope | KeyPart::Operation => Misconfigured::Refused(invalid.into()).into(),
    })
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
