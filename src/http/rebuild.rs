//! The service's code that rebuilds the answer to a retry from a stored reference.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Response};
use serde::de::DeserializeOwned;
use sqlx::PgConnection;
use tokio::time::Instant;

use super::body::{LayerBody, has_no_body};
use super::rejection::{Misconfigured, Rejection};
use crate::{BoxError, Error};

/// Rebuilds the answer to a retry from the stored reference: for [`replay`](super::IdempotencyLayer::replay).
pub trait Replay: Send + Sync + 'static {
    /// What the handlers give to [`AnswerBy`](super::AnswerBy). Keep it able to read older values.
    type Reference: DeserializeOwned + Send;
    /// The body of the answer, which is read to its end before the transaction ends. It may have 64 MiB.
    type Body: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send;

    /// Rebuilds the answer. `request` is the retry, and its extensions contain the [`Key`](crate::Key). The connection
    /// is in a read-only transaction of its own, which is rolled back.
    ///
    /// - A response below 400 gets the status of the first answer, and `Idempotent-Replayed: true`. Its headers are
    ///   sent as they are.
    /// - Another response is sent as it is: for example a 403 for an account that may no longer see the order.
    /// - `None` means that the reference no longer resolves: 410 [`gone`](Rejection::Gone).
    ///
    /// # Errors
    ///
    /// A transient error is a 503, which the client retries, and any other is a 500. A panic is treated as one of the
    /// handler. [`run_timeout`](super::IdempotencyLayer::run_timeout) limits the time. The handler does not
    /// run in any of these cases.
    fn replay(
        &self,
        reference: Self::Reference,
        request: &Parts,
        conn: &mut PgConnection,
    ) -> impl Future<Output = Result<Option<Response<Self::Body>>, Error>> + Send;
}

type Rebuilding<'r> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, Rejection>> + Send + 'r>>;

/// [`Replay`] without its types.
pub(super) trait Rebuild: Send + Sync {
    fn check(&self, reference: &[u8]) -> Result<(), Misconfigured>;

    /// The answer has at most this number of bytes, and is read until `end`.
    fn rebuild<'r>(
        &'r self,
        reference: &'r [u8],
        request: &'r Parts,
        conn: &'r mut PgConnection,
        most: usize,
        end: Instant,
    ) -> Rebuilding<'r>;
}

/// The text of serde_json's error would quote the reference, which may be confidential.
fn decoded<T: DeserializeOwned>(reference: &[u8]) -> Result<T, Misconfigured> {
    serde_json::from_slice(reference).map_err(|error| {
        let source = format!("{:?} error at column {}", error.classify(), error.column()).into();
        Misconfigured::Refused(Error::Undecodable { step: None, source })
    })
}

impl<R: Replay> Rebuild for R {
    fn check(&self, reference: &[u8]) -> Result<(), Misconfigured> {
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
                // The layer's transaction is read only on every primary.
                match error.is_transient() && !error.is_write_in_read_only() {
                    true => Rejection::Unavailable(Arc::new(error)),
                    false => Misconfigured::Refused(error).into(),
                }
            })?;
            let (parts, body) = rebuilt.ok_or(Rejection::Gone)?.into_parts();
            let empty = has_no_body(request.method == Method::HEAD, parts.status);
            let read = LayerBody::of_response(body, empty, most, end).await.map_err(|broken| broken.to_string());
            let whole = read.and_then(|body| {
                body.as_whole().cloned().ok_or_else(|| format!("it has more than {most} bytes, or took too long"))
            });
            Ok(Response::from_parts(parts, whole.map_err(Misconfigured::BrokenResponse)?))
        })
    }
}
