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

/// How much of a gRPC response is read to come to its status, which is at its end. gRPC's implementations take messages of up
/// to 4 MiB unless they are configured otherwise; the rest is for its frame.
const GRPC_LIMIT: usize = 4 * 1024 * 1024 + 1024;

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
    let grpc = replay::is_grpc(&parts.headers);
    let read = if grpc {
        read_grpc(body, settings.response_limit).await?
    } else if kept {
        read_up_to(body, settings.response_limit).await?
    } else {
        Read::Unfinished(Body::untouched(body))
    };
    let (stored, body) = match read {
        Read::Whole { data, trailers } => {
            if trailers.as_ref().is_some_and(replay::grpc_failed) {
                return Ok(Conclusion::Free { response: Response::from_parts(parts, Body::whole(data, trailers)) });
            }
            let body = match kept && data.len() <= settings.response_limit {
                true => Some((sealed(settings, key, &data)?, trailers.as_ref())),
                false => None,
            };
            let stored = replay::stored(&parts, body, &settings.replayed_headers);
            (stored, Body::whole(data, trailers))
        }
        Read::Unfinished(body) => (replay::stored(&parts, None, &settings.replayed_headers), body),
    };
    Ok(Conclusion::Store { stored, response: Response::from_parts(parts, body), undo })
}

/// Whether a response without a key is a success, as far as [`conclude`] would say so.
pub(super) async fn succeeded<B>(
    settings: &Settings,
    response: Response<B>,
) -> Result<(bool, Response<Body<B>>), Misconfigured>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let fine = response.status().as_u16() < 400 && !replay::grpc_failed(response.headers());
    if !fine || !replay::is_grpc(response.headers()) {
        return Ok((fine, response.map(Body::untouched)));
    }
    let (parts, body) = response.into_parts();
    let (fine, body) = match read_grpc(body, settings.response_limit).await? {
        Read::Whole { data, trailers } => {
            (!trailers.as_ref().is_some_and(replay::grpc_failed), Body::whole(data, trailers))
        }
        Read::Unfinished(body) => (fine, body),
    };
    Ok((fine, Response::from_parts(parts, body)))
}

/// Reads a gRPC response to its end, kept or not: a call that failed says so in the trailers, and what is committed by then
/// would stay.
async fn read_grpc<B>(body: B, response_limit: usize) -> Result<Read<B>, Misconfigured>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    match read_up_to(body, response_limit.max(GRPC_LIMIT)).await? {
        Read::Unfinished(_) => Err(Misconfigured::GrpcStatusTooLate),
        whole => Ok(whole),
    }
}

async fn read_up_to<B>(body: B, bytes: usize) -> Result<Read<B>, Misconfigured>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let limit = Limit { bytes, patience: Some(STREAM_PATIENCE) };
    read(body, limit).await.map_err(|error| Misconfigured::BrokenResponse(error.into().to_string()))
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
