//! The proof that a request was refused before its handler began: a leased layer then frees the key.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(feature = "axum")]
use axum::extract::{FromRequest, Request};
#[cfg(feature = "axum")]
use axum::response::{IntoResponse, Response};
use http::Extensions;
#[cfg(feature = "axum")]
use http::StatusCode;

use crate::lease::Lease;

/// In the extensions of a response: no handler has begun under the claim with this token. Only the functions of this
/// file write it, because a status proves nothing. A handler may answer 404 itself, and may have sent its text before.
#[derive(Clone, Copy)]
pub(super) struct NotBegun {
    pub(super) token: i64,
}

/// The lease of a request, in its extensions, and whether code of the service has taken it. After that nothing is a
/// proof: something inside the layer may call the handler again, and the first call may have had its effect.
#[derive(Clone)]
pub(super) struct Loan {
    pub(super) lease: Lease,
    taken: Arc<AtomicBool>,
}

impl Loan {
    pub(super) fn new(lease: Lease) -> Self {
        Self { lease, taken: Arc::default() }
    }

    pub(super) fn of(extensions: &Extensions) -> Option<&Self> {
        extensions.get()
    }

    /// Whether it was taken before.
    pub(super) fn take(&self) -> bool {
        self.taken.swap(true, Ordering::Relaxed)
    }

    #[cfg(feature = "axum")]
    fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }
}

/// The [`Lease`] of a request, together with its body. `B` is any extractor of axum that takes the body, such as
/// `Json<T>`, or a tuple that ends with one, such as `(Path<T>, Json<U>)`.
///
/// It reads and checks the request first, and lends the [`Lease`] then. If the request is refused, the layer knows that
/// the handler has not begun: **the key is free, also under `AtMostOnce`**, and the corrected request may use it. After
/// a refusal by any other extractor the key is indeterminate under `AtMostOnce`, and waits for an operator. So put each
/// extractor that can refuse a request into this one.
///
/// ```
/// # use axum::{Json, Router, extract::Path, http::StatusCode, routing::post};
/// # use pg_idempotency::http::{LeasedBody, method_not_allowed, not_found};
/// # async fn send_text(_: &str, _: &str) -> Result<(), StatusCode> { Ok(()) }
/// async fn remind(LeasedBody(lease, (Path(phone), Json(text))): LeasedBody<(Path<String>, Json<String>)>) -> StatusCode {
///     if text.is_empty() {
///         return lease.not_performed(StatusCode::UNPROCESSABLE_ENTITY);
///     }
///     send_text(&phone, &text).await.err().unwrap_or(StatusCode::CREATED)
/// }
///
/// # fn f(idempotency: pg_idempotency::http::IdempotencyLayer) -> Router {
/// Router::new()
///     .route("/reminders/{phone}", post(remind))
///     .method_not_allowed_fallback(method_not_allowed) // after the routes, and before the layer
///     .fallback(not_found)
///     .route_layer(idempotency)
/// # }
/// ```
///
/// A middleware between the layer and the handler runs before: it must have no effect of its own. If it takes the
/// [`Lease`], a refusal proves nothing. A handler that takes a `Result<LeasedBody<_>, _>` returns the refusal only if
/// it has done nothing.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
#[derive(Debug)]
pub struct LeasedBody<B>(pub Lease, pub B);

#[cfg(feature = "axum")]
impl<S: Send + Sync, B: FromRequest<S>> FromRequest<S> for LeasedBody<B> {
    /// The refusal of `B`, or that of [`NoLease`](super::NoLease).
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

/// A 404 for `Router::fallback`, after which the key is free, as after a refusal by [`LeasedBody`]. After any other 404
/// the key is indeterminate under `AtMostOnce`.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub async fn not_found(request: Request) -> Response {
    unbegun(request.extensions(), StatusCode::NOT_FOUND.into_response())
}

/// A 405 for `Router::method_not_allowed_fallback`, as [`not_found`]. `Router::route_layer` covers the 405 of each of
/// its routes.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub async fn method_not_allowed(request: Request) -> Response {
    unbegun(request.extensions(), StatusCode::METHOD_NOT_ALLOWED.into_response())
}

/// The response to a request that no handler has seen.
#[cfg(feature = "axum")]
fn unbegun(extensions: &Extensions, mut response: Response) -> Response {
    if let Some(loan) = Loan::of(extensions)
        && !loan.is_taken()
    {
        response.extensions_mut().insert(NotBegun { token: loan.lease.token() });
    }
    response
}
