//! Answers by reference: the record keeps what identifies an answer, and a replay builds the answer anew.

use http::{Extensions, HeaderValue, StatusCode};
use serde::Serialize;
use tokio::time::Instant;

use super::body::LayerBody;
use super::handler::{Handler, NoResponse, Reply};
use super::layer::IdempotencyLayer;
use super::rejection::{Misconfigured, Rejection};
use super::replay::{IDEMPOTENT_REPLAYED, replay};
use crate::Error;
use crate::caught::caught;
use crate::outcome::{Response as Stored, to_json};
use crate::session::{Opening, in_pooled_transaction, or_closed};

/// Stored in place of the headers. A list of headers is a JSON array, so it never equals this string.
const IS_REFERENCE: &str = "\"reference\"";

/// How large a rebuilt answer may be, in bytes. References are for large answers, but an answer without an end must not
/// fill the memory.
const REBUILT_LIMIT: usize = 64 * 1024 * 1024;

/// A part of a response whose record keeps this reference and the status, but neither headers nor body. The client gets
/// the response as the handler made it. A retry gets one that the layer's [`Replay`](super::Replay) makes of the
/// reference. A transactional layer that could not replay the reference undoes everything, and answers 500.
///
/// With axum: `(StatusCode::CREATED, AnswerBy(order.id), Json(order))`. A reference that has no JSON form makes the
/// response a 500. The guide's page `by_reference` has examples.
#[derive(Clone, Debug)]
pub struct AnswerBy<T>(pub T);

/// The handler's reference, in the response's extensions. It has no type parameter, so the layer finds a reference of
/// any type, and does not store the body.
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
    /// Fails if a replay could not read this reference.
    pub(super) fn check(&self, layer: &IdempotencyLayer) -> Result<(), Misconfigured> {
        layer.replay.as_deref().ok_or(Misconfigured::NoReplay)?.check(&self.0)
    }

    /// Above the limit of a response, the reference is not stored either.
    pub(super) fn into_record(self, status: StatusCode, limit: usize) -> Stored {
        // `StatusCode` is at most 999.
        let status = Some(status.as_u16().cast_signed());
        if self.0.len() > limit {
            return Stored { status, headers: None, body: None };
        }
        Stored { status, headers: Some(IS_REFERENCE.to_owned()), body: Some(self.0) }
    }

    /// `None` if the record has a body, or is damaged.
    fn of(stored: &Stored) -> Option<(StatusCode, &[u8])> {
        let status = StatusCode::from_u16(stored.status?.cast_unsigned()).ok()?;
        let reference = stored.body.as_deref()?;
        (stored.headers.as_deref() == Some(IS_REFERENCE)).then_some((status, reference))
    }
}

/// The answer to a retry: the stored response, or one that is rebuilt of the stored reference.
pub(super) async fn answer_again<H: Handler>(layer: &IdempotencyLayer, stored: Stored, handler: H) -> Reply<H> {
    let Some((status, reference)) = Reference::of(&stored) else { return Ok(replay(stored)?) };
    let rebuild = layer.replay.as_deref().ok_or(Misconfigured::NoReplay)?;
    let (request, limit) = (handler.into_parts(), layer.run_timeout);
    let end = Instant::now() + limit;
    // Read only and rolled back, because a retry has no effect.
    let rebuilding = in_pooled_transaction(&layer.pool, Opening::ReadOnly, async |conn| {
        let rebuilt = caught(rebuild.rebuild(reference, &request, conn, REBUILT_LIMIT, end)).await;
        Ok::<_, NoResponse<H::Error>>(rebuilt.map_err(NoResponse::Panicked)??)
    });
    let rebuilt = or_closed(limit, rebuilding).await;
    let mut response = rebuilt.unwrap_or_else(|| Err(Rejection::TimedOut { limit }.into()))?;
    // `replay` may pass on a response that another service has replayed.
    response.headers_mut().remove(IDEMPOTENT_REPLAYED);
    if response.status().as_u16() < 400 {
        *response.status_mut() = status;
        response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response.map(LayerBody::whole))
}
