//! What a handler's response means for its key.

use std::time::Duration;

use bytes::Bytes;
use http::Response;

use super::body::{Body, Limit, Read, read};
use super::rejection::Misconfigured;
use super::replay;
use super::settings::Settings;
use crate::{BoxError, Key, record};

/// How long a response of unknown length may take to end before it counts as a stream. The transaction is open meanwhile.
const STREAM_PATIENCE: Duration = Duration::from_secs(1);

/// Marks a response that is sent and not stored: put it into the response's extensions. With axum:
/// `(Extension(NoStore), secret).into_response()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoStore;

/// Marks the response of a handler that did nothing outside, under a lease at most once: its key is freed instead of left
/// indeterminate. Put it into the response's extensions.
#[derive(Clone, Copy, Debug, Default)]
pub struct NotPerformed;

/// What becomes of the key.
pub(super) enum Conclusion<B> {
    /// Done: store this with the key, then send that.
    Store { stored: record::Response, response: Response<Body<B>>, undo: bool },
    /// Failed: free the key, then send that.
    Free { response: Response<Body<B>> },
}

/// Reads the handler's response and judges it: below 400 it is stored, and so are the errors that the service has chosen;
/// any other frees the key.
pub(super) async fn conclude<B>(
    settings: &Settings,
    key: &Key,
    response: Response<B>,
) -> Result<Conclusion<B>, Misconfigured>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let status = response.status();
    let undo = settings.stored_errors.contains(&status);
    let fine = status.as_u16() < 400 && !replay::grpc_failed(response.headers());
    if !fine && !undo {
        return Ok(Conclusion::Free { response: response.map(Body::untouched) });
    }
    let (parts, body) = response.into_parts();
    // An upgraded connection is nothing to repeat.
    let kept = !settings.no_store && parts.extensions.get::<NoStore>().is_none() && !status.is_informational();
    let limit = Limit { bytes: settings.response_limit, patience: Some(STREAM_PATIENCE) };
    let read = if kept {
        read(body, limit).await.map_err(|error| Misconfigured::BrokenResponse(error.into().to_string()))?
    } else {
        Read::Unfinished(Body::untouched(body))
    };
    let (stored, body) = match read {
        Read::Whole { data, trailers } => {
            if trailers.as_ref().is_some_and(replay::grpc_failed) {
                return Ok(Conclusion::Free { response: Response::from_parts(parts, Body::whole(data, trailers)) });
            }
            let body = Some((sealed(settings, key, &data)?, trailers.as_ref()));
            let stored = replay::stored(&parts, body, &settings.replayed_headers);
            (stored, Body::whole(data, trailers))
        }
        Read::Unfinished(body) => (replay::stored(&parts, None, &settings.replayed_headers), body),
    };
    Ok(Conclusion::Store { stored, response: Response::from_parts(parts, body), undo })
}

fn sealed(settings: &Settings, key: &Key, data: &Bytes) -> Result<Vec<u8>, Misconfigured> {
    match &settings.seal {
        Some(seal) => seal.seal(key, data).map_err(Misconfigured::Unsealable),
        None => Ok(data.to_vec()),
    }
}

/// The stored response of an earlier request, to be sent again.
pub(super) fn replayed<B>(
    settings: &Settings,
    key: &Key,
    stored: record::Response,
) -> Result<Response<Body<B>>, super::Rejection> {
    replay::replay(stored, |body| match &settings.seal {
        None => Some(body),
        Some(seal) => seal
            .open(key, body)
            .inspect_err(|error| {
                let error = &**error as &dyn std::error::Error;
                tracing::error!(operation = key.operation(), error, "a stored response does not open");
            })
            .ok(),
    })
}
