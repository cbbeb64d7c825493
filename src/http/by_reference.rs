//! Answers by reference: the record keeps what identifies an answer, and a replay builds the answer anew.

use std::pin::Pin;

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderValue, Response, StatusCode};
use http_body_util::BodyExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::body::LayerBody;
use super::handler::{Handler, Reply, Unanswered};
use super::layer::IdempotencyLayer;
use super::rejection::{Misconfigured, Rejection};
use super::replay::{IDEMPOTENT_REPLAYED, replay};
use crate::caught::caught;
use crate::outcome::to_json;
use crate::response::Response as Stored;
use crate::session::{Opening, in_pooled_transaction, or_closed};
use crate::{BoxError, Error};

/// In the place of the headers. No list of headers looks like this.
const IS_REFERENCE: &str = "\"reference\"";

/// A part of a response whose record keeps this reference and the status, but neither headers nor body. The client gets
/// the response as the handler made it. A repeat gets one that the layer's [`Replay`] makes of the reference.
///
/// With axum: `(StatusCode::CREATED, AnswerBy(order.id), Json(order))`. A reference that has no JSON form makes the
/// response a 500. The guide's page `by_reference` has examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnswerBy<T>(pub T);

/// In the extensions of a response. It has no type parameter, so a reference of the wrong type is still a reference, and
/// the body is not stored.
#[derive(Clone)]
pub(super) struct Reference(Vec<u8>);

impl<T: Serialize> AnswerBy<T> {
    /// Puts the reference into the extensions of a response, without axum.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`]. Answer with an error then.
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
    pub(super) fn into_record(self, status: StatusCode) -> Stored {
        // `StatusCode` is at most 999.
        let status = Some(status.as_u16().cast_signed());
        Stored { status, headers: Some(IS_REFERENCE.to_owned()), body: Some(self.0) }
    }

    /// `None` if the record has a body, or is damaged.
    fn of(stored: &Stored) -> Option<(StatusCode, &[u8])> {
        let status = StatusCode::from_u16(stored.status?.cast_unsigned()).ok()?;
        let reference = stored.body.as_deref()?;
        (stored.headers.as_deref() == Some(IS_REFERENCE)).then_some((status, reference))
    }
}

/// Makes the answer to a repeat of a reference: for [`with_replay`](IdempotencyLayer::with_replay).
pub trait Replay: Send + Sync + 'static {
    /// What the handlers give to [`AnswerBy`]. Keep it able to read older values.
    type Reference: DeserializeOwned + Send;
    /// The body of the answer, which is read to its end before the transaction ends.
    type Body: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send;

    /// Rebuilds the answer. `request` is the repeat, and its extensions have the [`Key`](crate::Key). The connection is in a
    /// read-only transaction of its own.
    ///
    /// - A response below 400 gets the status of the first answer, and `Idempotent-Replayed: true`. Its headers are sent as
    ///   they are.
    /// - Another response is sent as it is: for example a 403 for an account that may no longer see the order.
    /// - `None` means that the reference no longer resolves: 410 [`gone`](Rejection::Gone).
    ///
    /// # Errors
    ///
    /// A transient error is a 503, which the client retries, and any other is a 500. A panic continues as one of the
    /// handler does. The time is that of [`with_run_timeout`](IdempotencyLayer::with_run_timeout). The handler does not run
    /// in any of these cases.
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
    fn rebuild<'r>(&'r self, reference: &'r [u8], request: &'r Parts, conn: &'r mut PgConnection) -> Rebuilding<'r>;
}

impl<R: Replay> Rebuild for R {
    fn rebuild<'r>(&'r self, reference: &'r [u8], request: &'r Parts, conn: &'r mut PgConnection) -> Rebuilding<'r> {
        Box::pin(async move {
            // A mistake of the service, and not a response that was not stored.
            let reference = serde_json::from_slice(reference)
                .map_err(|error| Misconfigured::Refused(Error::Undecodable { step: None, source: error.into() }))?;
            let rebuilt = self.replay(reference, request, conn).await.map_err(Rejection::of)?;
            let (parts, body) = rebuilt.ok_or(Rejection::Gone)?.into_parts();
            let body = body.collect().await;
            let body = body.map_err(|error| Misconfigured::BrokenResponse(error.into().to_string()))?;
            Ok(Response::from_parts(parts, body.to_bytes()))
        })
    }
}

/// The answer to a repeat: the stored response, or one that is rebuilt of the stored reference.
pub(super) async fn answer_again<H: Handler>(layer: &IdempotencyLayer, stored: Stored, handler: H) -> Reply<H> {
    let Some((status, reference)) = Reference::of(&stored) else { return Ok(replay(stored)?) };
    let rebuild = layer.replay.as_deref().ok_or(Misconfigured::NoReplay)?;
    let (request, limit) = (handler.into_parts(), layer.run_timeout);
    // Read only, because a repeat has no effect.
    let rebuilding = in_pooled_transaction(&layer.pool, Opening::ReadOnly, async |conn| {
        let rebuilt = caught(rebuild.rebuild(reference, &request, conn)).await;
        Ok::<_, Unanswered<H::Error>>(rebuilt.map_err(Unanswered::Panicked)??)
    });
    let rebuilt = or_closed(limit, rebuilding).await;
    let mut response = rebuilt.unwrap_or_else(|| Err(Rejection::TimedOut { limit }.into()))?;
    if response.status().as_u16() < 400 {
        *response.status_mut() = status;
    }
    if response.status() == status {
        response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response.map(LayerBody::whole))
}
