//! The values in the extensions of requests and responses. The layer, the handler and the resumer are on both sides of
//! the service's own code, which passes only a request in and a response out. So these values are their interface.
//!
//! | in a request | written by | read by |
//! |---|---|---|
//! | [`Key`] | `service.rs` before a run, `resume.rs` | an inner layer, which refuses the request ([`is_covered`]); [`IdempotentTx::take`]; the service |
//! | [`Slot`] | `transactional.rs` ([`Lender`]) | [`IdempotentTx::take`]; an inner layer, as above |
//! | [`LentLease`] | `leased.rs` | [`Lease::of_request`], [`LeasedBody`], [`not_found`], [`method_not_allowed`]; `service.rs`, which passes a resumed request on |
//! | [`WithoutKey`] | `leased.rs` | [`Lease::of_request`] |
//! | [`FromResumer`] | `resume.rs` | `service.rs`, which removes it; `leased.rs` |
//! | `MatchedPath`, `OriginalUri` | axum | `request.rs` |
//!
//! | in a response | written by | read by |
//! |---|---|---|
//! | [`NoStore`] | the handler | `handler.rs` |
//! | [`LastError`] | the handler | `leased.rs` |
//! | [`NotBegun`] | [`LeasedBody`], [`not_found`], [`method_not_allowed`] | `leased.rs` |
//! | [`Rejection`](super::Rejection) | `service.rs` | an outer layer, which does not judge the response (`handler.rs`, `leased.rs`); the service |

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

#[cfg(feature = "axum")]
use axum::extract::{FromRequest, FromRequestParts, Request};
#[cfg(feature = "axum")]
use axum::response::{IntoResponse, Response};
use http::Extensions;
#[cfg(feature = "axum")]
use http::{StatusCode, request::Parts};
use sqlx::PgConnection;
use tokio::sync::{Mutex as AsyncMutex, OwnedMappedMutexGuard, OwnedMutexGuard};

use super::rejection::Mistake;
#[cfg(feature = "axum")]
use super::rejection::cannot_have;
use crate::lease::Lease;
use crate::session::Session;
use crate::{Key, Mode};

/// Marks a response that the layer must send and must not store. Put this value into the extensions of the response.
/// With axum, write `(Extension(NoStore), secret).into_response()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoStore;

/// The reason why an operation failed. Put this value into the extensions of an error response. A leased layer stores
/// the first 2000 characters as the last error of the record. The console and `idempotency-janitor show` print this
/// error. Without this value, the error is a text such as *the handler answered 503 Service Unavailable*. With axum,
/// write `(Extension(LastError(reason)), StatusCode::SERVICE_UNAVAILABLE).into_response()`.
///
/// The client does not see the reason. A transactional layer ignores the reason, because such a layer keeps nothing of
/// a failure. If a layer stores the response, the layer also ignores the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError(pub String);

/// The transaction that holds the key. The handler's writes through this transaction commit with the response, or not
/// at all.
///
/// The type dereferences to a `PgConnection`. So write `sqlx::query(…).execute(&mut *tx)`, and `tx.begin()` for
/// savepoints. With axum, the type is an extractor. Without axum, [`take`](Self::take) the transaction from the
/// request's extensions.
///
/// - Drop the transaction before the response is returned.
/// - Send no COMMIT or ROLLBACK through the transaction, because the layer would then answer 500.
/// - The layer lends the transaction once for each request, so put code that retries the handler outside the layer.
pub struct IdempotentTx {
    transaction: OwnedMappedMutexGuard<Lent, Session>,
    key: Option<Key>,
}

/// The layer's side of the transaction that the handler borrows. An [`IdempotentTx`] also keeps the transaction alive.
pub(super) struct Lender(Arc<AsyncMutex<Lent>>);

/// The handler's side of the transaction, in the request's extensions.
#[derive(Clone)]
struct Slot(Weak<AsyncMutex<Lent>>);

pub(super) struct Lent {
    pub(super) session: Session,
    pub(super) taken: Taken,
}

pub(super) enum Taken {
    Never,
    /// The handler has taken the transaction. The transaction is not lent again, because it has the handler's writes,
    /// and a retry of the handler would write them twice.
    Once,
    /// The handler has dropped the transaction, and tried to take it again.
    Again,
}

impl Lender {
    pub(super) fn of(session: Session, extensions: &mut Extensions) -> Self {
        let lent = Arc::new(AsyncMutex::new(Lent { session, taken: Taken::Never }));
        extensions.insert(Slot(Arc::downgrade(&lent)));
        Self(lent)
    }

    /// Takes the transaction back. Returns `None` if the handler, or a task that it spawned, still has the transaction.
    /// The transaction is then rolled back when its holder drops it.
    pub(super) fn end(self) -> Option<Lent> {
        Arc::into_inner(self.0).map(AsyncMutex::into_inner)
    }
}

/// Whether an outer layer holds a key or lends a transaction for this request.
pub(super) fn is_covered(request: &Extensions) -> bool {
    request.get::<Key>().is_some() || request.get::<Slot>().is_some_and(|Slot(lent)| lent.strong_count() > 0)
}

/// The reason why a handler cannot have the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTransaction {
    /// No transactional layer is in front of this handler, or the layer does not cover this method.
    #[error(
        "there is no idempotent transaction here: no transactional IdempotencyLayer covers this method and route (by \
         default POST and PATCH, of the routes that the Router had when the layer was added)"
    )]
    NotLent,
    /// Another extractor of the same handler, or a task that the handler spawned, has the transaction.
    #[error("the idempotent transaction is taken, and was not given back")]
    Taken,
    /// Code inside the layer calls the handler a second time. The layer then commits nothing, and answers 500.
    #[error("the idempotent transaction was given back, and is lent once; put the code that retries outside the layer")]
    GivenBack,
}

impl IdempotentTx {
    /// Takes the transaction from the extensions of a request.
    ///
    /// # Errors
    ///
    /// [`NoTransaction`].
    pub fn take(extensions: &Extensions) -> Result<Self, NoTransaction> {
        let Slot(lent) = extensions.get().ok_or(NoTransaction::NotLent)?;
        let lent = lent.upgrade().ok_or(NoTransaction::GivenBack)?;
        let mut lent = lent.try_lock_owned().map_err(|_| NoTransaction::Taken)?;
        if !matches!(lent.taken, Taken::Never) {
            lent.taken = Taken::Again;
            return Err(NoTransaction::GivenBack);
        }
        lent.taken = Taken::Once;
        let transaction = OwnedMutexGuard::map(lent, |lent| &mut lent.session);
        Ok(Self { transaction, key: extensions.get().cloned() })
    }

    /// The key of the request. `None` for a request [without a key](super::IdempotencyLayer::optional_key).
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }
}

impl Deref for IdempotentTx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.transaction
    }
}

impl DerefMut for IdempotentTx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }
}

impl fmt::Debug for IdempotentTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotentTx").finish_non_exhaustive()
    }
}

#[cfg(feature = "axum")]
impl<S: Sync> FromRequestParts<S> for IdempotentTx {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoTransaction> {
        Self::take(&parts.extensions)
    }
}

/// A 500 without a body, because the text of the mistake is for the service's log.
#[cfg(feature = "axum")]
impl IntoResponse for NoTransaction {
    fn into_response(self) -> Response {
        cannot_have("IdempotentTx", &self)
    }
}

/// The lease of a request, and whether code of the service has taken the lease. Once code has taken the lease, nothing
/// proves any more that the handler has not begun. Code inside the layer may call the handler again, and the first call
/// may have had its effect.
#[derive(Clone)]
pub(super) struct LentLease {
    lease: Lease,
    taken: Arc<AtomicBool>,
}

impl LentLease {
    pub(super) fn new(lease: Lease) -> Self {
        Self { lease, taken: Arc::default() }
    }

    fn of(request: &Extensions) -> Option<&Self> {
        request.get()
    }

    /// Whether the request has a lease of this key that is not lost.
    pub(super) fn is_live(request: &Extensions, key: &Key) -> bool {
        Self::of(request).is_some_and(|lent| lent.lease.key() == key && !lent.lease.is_lost())
    }

    /// Takes the lease, and returns whether the lease was taken before.
    fn take(&self) -> bool {
        self.taken.swap(true, Ordering::Relaxed)
    }

    /// Adds the proof that no handler has begun to a response, unless code has taken the lease.
    #[cfg(feature = "axum")]
    fn prove_not_begun(&self, response: &mut Extensions) {
        if !self.taken.load(Ordering::Relaxed) {
            response.insert(NotBegun { token: self.lease.token() });
        }
    }
}

/// The proof that no handler has begun under the claim with this token. A status is not a proof, because a handler that
/// has had an effect may also answer 404.
#[derive(Clone, Copy)]
pub(super) struct NotBegun {
    token: i64,
}

impl NotBegun {
    pub(super) fn is_proved(response: &Extensions, lease: &Lease) -> bool {
        response.get::<Self>().is_some_and(|proof| proof.token == lease.token())
    }
}

/// Marks a request without a key that a leased layer has passed on.
#[derive(Clone, Copy)]
pub(super) struct WithoutKey;

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
impl<S: Sync> FromRequestParts<S> for Lease {
    type Rejection = NoLease;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoLease> {
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

/// Marks a resumed request, whose key has a record. The layer in the service removes this mark when the layer has
/// compared its key with the key of the record.
#[derive(Clone)]
pub(super) struct FromResumer {
    key: Key,
    /// The reason why the layer in the service refused the request. The resumer reads the reason here, because code
    /// between the layer and the resumer may change the layer's response.
    mistake: Arc<Mutex<Option<String>>>,
}

impl FromResumer {
    pub(super) fn new(key: Key) -> Self {
        Self { key, mistake: Arc::default() }
    }

    /// Compares the key that the layer has found with the key of the record. Under another key, the effect would have
    /// another downstream key, and could happen twice.
    pub(super) fn meets(&self, key: &Key) -> Result<(), Mistake> {
        let mistake = (self.key != *key).then(|| Mistake::ResumedUnderAnotherKey {
            recorded: self.key.operation().to_owned(),
            found: key.operation().to_owned(),
        });
        *self.mistake.lock().unwrap_or_else(PoisonError::into_inner) = mistake.as_ref().map(ToString::to_string);
        mistake.map_or(Ok(()), Err)
    }

    /// Returns the reason why nothing was performed, if the request has another key here than in its record.
    pub(super) fn mistake(&self) -> Option<String> {
        self.mistake.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
