//! The run of a leased layer. The run claims the key, lends the lease to the handler, and stores the handler's response
//! or frees the key. The extractors of the handler take the lease, or prove that the handler has not begun.

use std::borrow::Cow;
use std::pin::pin;

#[cfg(feature = "axum")]
use axum::extract::{FromRequest, Request};
#[cfg(feature = "axum")]
use axum::response::{IntoResponse, Response};
use http::{Extensions, StatusCode};

use super::body::{ByteBody, LayerBody};
use super::extensions::{FromResumer, LastError, LentLease, NotBegun, WithoutKey};
use super::handler::{Called, Conclusion, Handler, NoResponse, Ran, Reply, conclude};
use super::layer::IdempotencyLayer;
use super::places::Turn;
use super::rejection::Rejection;
#[cfg(feature = "axum")]
use super::rejection::cannot_have;
use super::replay::replay;
use super::request::Ticket;
use crate::lease::{Acquired, Call, Lease, LeaseOptions, LeaseOwner};
use crate::observe::performing;
use crate::record::CalledAt;
use crate::{Error, Mode};

/// Claims the key, calls the handler and stores its response. If there is a stored response, replays it instead.
pub(super) async fn run<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    options: LeaseOptions,
    ticket: &Ticket,
    mut turn: Turn<'_>,
    handler: Handler<R, E>,
) -> Reply<R, E> {
    let (asked, request) = (CalledAt::since(ticket.arrived), ticket.stored.as_deref().map(Cow::Borrowed));
    let call = Call::new(options, &layer.pool, &ticket.key, ticket.fingerprint, request, asked)?;
    match call.acquire(&mut turn).await? {
        Acquired::Replayed(stored) => Ok(replay(stored)?),
        Acquired::Owner(owner) => {
            turn.hold_key();
            Ok(perform(layer, owner, handler).await?.into_response())
        }
    }
}

/// Calls the handler for a request without a key. The handler gets no lease.
pub(super) async fn run_without_key<R, E>(layer: &IdempotencyLayer, mut handler: Handler<R, E>) -> Reply<R, E> {
    handler.extensions.insert(WithoutKey);
    Ok(handler.call(layer.run_timeout).await?.map(LayerBody::untouched))
}

/// Calls the handler, and stores its response or releases the claim. Releases the claim of a resumed request, if the
/// layer in the service has found another key for the request than the record has.
pub(super) async fn perform<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    mut owner: LeaseOwner,
    mut handler: Handler<R, E>,
) -> Result<Ran<R>, NoResponse<E>> {
    let lease = Lease::clone(&owner);
    let resumed = handler.extensions.get::<FromResumer>().cloned();
    handler.extensions.insert(LentLease::new(lease.clone()));
    let called = Called::now(&handler, true);
    // The response body is a part of the work, because the body may also have effects outside the database.
    let work = async {
        owner.begin();
        conclude(layer, called, handler.call(layer.run_timeout).await?).await
    };
    let work = lease.unless_lost(work);
    let concluded = performing(lease.mode(), lease.operation(), pin!(work)).await;
    let Some(concluded) = concluded else { return Err(owner.failed(Error::LeaseLost).into()) };
    // The layer in the service has refused the request. The service may have changed the response of that layer, but
    // even the changed response is not an answer to the request.
    if let Some(mistake) = resumed.as_ref().and_then(FromResumer::mistake) {
        owner.fail(&mistake).await;
        let (Conclusion::Store { response, .. } | Conclusion::Free { response }) = concluded?;
        return Ok(Ran::Failed(response));
    }
    let (reason, ran) = match concluded {
        Ok(Conclusion::Store { stored, response, .. }) => {
            owner.complete_encoded(&stored).await?;
            return Ok(Ran::Performed(response));
        }
        Ok(Conclusion::Free { response }) => {
            let status = response.status();
            // Before the layer itself uses the lease.
            let is_used = lease.is_used();
            let not_begun = NotBegun::is_proved(response.extensions(), &lease);
            if not_begun {
                lease.not_performed(());
            } else if !is_used && lease.mode() == Mode::AtMostOnce && comes_before_a_handler(status) {
                warn_of_a_lost_key(layer, &lease, status);
            }
            let attached = response.extensions().get().map(|LastError(reason)| reason.clone());
            let reason = attached.unwrap_or_else(|| format!("the handler answered {status}"));
            // If another idempotency layer has rejected the request, the handler has not refused it.
            if status.is_client_error() && response.extensions().get::<Rejection>().is_none() {
                return match owner.refuse(&reason, is_final(status), not_begun).await {
                    // The statement failed, so the record still has the request. The client must not get the refusal,
                    // because a resumer could perform the request.
                    Err(error) if is_final(status) => Err(error.into()),
                    _ => Ok(Ran::Failed(response)),
                };
            }
            (reason, Ok(Ran::Failed(response)))
        }
        Err(error) => (reason(&error).to_owned(), Err(error)),
    };
    owner.fail(&reason).await;
    ran
}

/// Whether this 4xx is a final refusal. The other 4xx ask the client to repeat the request.
fn is_final(status: StatusCode) -> bool {
    !matches!(
        status,
        StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
    )
}

/// Whether a router or an extractor usually gives this answer, and a handler seldom does.
fn comes_before_a_handler(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNSUPPORTED_MEDIA_TYPE
    )
}

/// Warns, once for each route, of a refusal that leaves the key indeterminate, although the handler has probably not
/// begun. The refusal has no proof of this, so the key waits for an operator.
fn warn_of_a_lost_key(layer: &IdempotencyLayer, lease: &Lease, status: StatusCode) {
    let operation = lease.operation();
    if layer.lost_keys.is_first(operation) {
        tracing::warn!(
            operation,
            token = lease.token(),
            status = status.as_u16(),
            "a request ended before any code had used its lease, and its key is indeterminate under AtMostOnce; if the \
             handler did not run, let it take its body as LeasedBody, and give the Router the fallbacks not_found and \
             method_not_allowed"
        );
    }
}

fn reason<E>(error: &NoResponse<E>) -> &'static str {
    match error {
        NoResponse::Rejected(Rejection::Misconfigured(_)) => "the handler's response could not be stored",
        NoResponse::Rejected(Rejection::TimedOut { .. }) => "the handler ran into the layer's time-out",
        NoResponse::Rejected(_) | NoResponse::Denied(_) => "the layer refused the response",
        NoResponse::Failed(_) => "the handler failed",
        NoResponse::Panicked(_) => "the handler panicked",
    }
}

/// The reason why a handler cannot have the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoLease {
    /// No leased layer is in front of this handler, or the layer does not cover this method.
    #[error("there is no lease here: no leased IdempotencyLayer covers this request")]
    NotLent,
    /// The request has no key, and a leased layer with [`optional_key`](super::IdempotencyLayer::optional_key) has
    /// passed it on. The handler may do its work without a lease, as it did before the service used keys.
    #[error("there is no lease here: the request has no key")]
    NoKey,
    /// Under `AtMostOnce`, the layer lends the lease only once. Code inside the layer may have called the handler a
    /// second time, although the first call may have had its effect. A middleware may also have taken the lease.
    #[error(
        "the lease was taken before, and under AtMostOnce it is lent once; put the code that retries outside the \
         layer, and let a middleware read the Key of the request's extensions instead"
    )]
    LentBefore,
}

impl Lease {
    /// Returns the lease of a request, in a handler behind a [leased layer](super::IdempotencyLayer::leased). The layer
    /// renews and ends the lease. With axum, `Lease` is an extractor. Under `AtMostOnce`, use the extractor
    /// [`LeasedBody`](super::LeasedBody) instead, which extracts the body before it takes the lease. If a separate
    /// extractor refuses the request, the key waits for an operator.
    ///
    /// # Errors
    ///
    /// [`NoLease`].
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn of_request(extensions: &Extensions) -> Result<Self, NoLease> {
        let Some(lent) = LentLease::of(extensions) else {
            return Err(extensions.get::<WithoutKey>().map_or(NoLease::NotLent, |_| NoLease::NoKey));
        };
        if lent.take() && lent.lease.mode() == Mode::AtMostOnce {
            return Err(NoLease::LentBefore);
        }
        Ok(lent.lease.clone())
    }
}

#[cfg(feature = "axum")]
impl<S: Sync> axum::extract::FromRequestParts<S> for Lease {
    type Rejection = NoLease;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, NoLease> {
        Self::of_request(&parts.extensions)
    }
}

/// A 500 without a body, because the text of the mistake is for the service's log.
#[cfg(feature = "axum")]
impl IntoResponse for NoLease {
    fn into_response(self) -> Response {
        cannot_have("Lease", &self)
    }
}

/// The [`Lease`] of a request, together with its body. `B` is any extractor of axum that takes the body, such as
/// `Json<T>`. `B` may also be a tuple that ends with such an extractor, for example `(Path<T>, Json<U>)`.
///
/// The extractor `B` runs before the lease is taken. If `B` refuses the request, the layer knows that the handler has
/// not begun. **Then the key is free, also under `AtMostOnce`**, and a corrected request may use the key. After a
/// refusal by any other extractor, the key is indeterminate under `AtMostOnce`. So make each extractor that can refuse
/// a request a part of `B`. For a route without a body, `B` may be `(Path<T>, Bytes)`, or the handler takes a
/// [`Lease`].
///
/// ```
/// # use axum::{Json, extract::Path, http::StatusCode};
/// # use pg_idempotency::http::LeasedBody;
/// # async fn send_text(_: &str, _: &str) -> Result<(), StatusCode> { Ok(()) }
/// async fn remind(LeasedBody(lease, (Path(phone), Json(text))): LeasedBody<(Path<String>, Json<String>)>) -> StatusCode {
///     if text.is_empty() {
///         return lease.not_performed(StatusCode::UNPROCESSABLE_ENTITY);
///     }
///     send_text(&phone, &text).await.err().unwrap_or(StatusCode::CREATED)
/// }
/// ```
///
/// The guide's page `http` shows a router for such a handler.
///
/// A middleware between the layer and the handler runs before `B`, so the middleware must have no effect of its own. If
/// a middleware takes the [`Lease`], a refusal does not prove any more that the handler has not begun. A handler that
/// takes a `Result<LeasedBody<_>, _>` may return the refusal only if the handler has done nothing.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
#[derive(Debug)]
pub struct LeasedBody<B>(pub Lease, pub B);

#[cfg(feature = "axum")]
impl<S: Send + Sync, B: FromRequest<S>> FromRequest<S> for LeasedBody<B> {
    /// The refusal of `B`, or the response of a [`NoLease`](super::NoLease).
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let extensions = request.extensions().clone();
        let body = match B::from_request(request, state).await {
            Ok(body) => body,
            Err(refusal) => return Err(unbegun(&extensions, refusal.into_response())),
        };
        Ok(Self(Lease::of_request(&extensions).map_err(IntoResponse::into_response)?, body))
    }
}

/// A 404 for `Router::fallback`, which frees the key as a refusal by [`LeasedBody`] does. After any other 404, the key
/// is indeterminate under `AtMostOnce`.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub async fn not_found(request: Request) -> Response {
    unbegun(request.extensions(), StatusCode::NOT_FOUND.into_response())
}

/// A 405 for `Router::method_not_allowed_fallback`, which frees the key as [`not_found`] does. A layer that was added
/// by `Router::route_layer` also covers the 405 of each route.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub async fn method_not_allowed(request: Request) -> Response {
    unbegun(request.extensions(), StatusCode::METHOD_NOT_ALLOWED.into_response())
}

#[cfg(feature = "axum")]
fn unbegun(request: &Extensions, mut response: Response) -> Response {
    if let Some(lent) = LentLease::of(request) {
        lent.prove_not_begun(response.extensions_mut());
    }
    response
}
