//! The lease in the handler's hands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::Extensions;

use crate::Key;
use crate::lease::Owner;

/// The lease under which a handler runs. The layer renews and settles it; the handler can only look at it.
///
/// With axum it is an extractor; elsewhere [`get`](Self::get) it from the request's extensions.
#[derive(Clone, Debug)]
pub struct IdempotentLease {
    owner: Owner,
    begun: Arc<AtomicBool>,
}

/// There is no lease: no leased layer is in front of this handler, or the layer does not cover this method, or the
/// request has no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no lease here: no leased IdempotencyLayer covers this request, or the request has no key")]
pub struct NoLease;

impl IdempotentLease {
    /// `begun`: whether the effect counts as begun before the handler says so.
    pub(super) fn new(owner: Owner, begun: bool) -> Self {
        Self { owner, begun: Arc::new(AtomicBool::new(begun)) }
    }

    /// The lease of a request.
    ///
    /// # Errors
    ///
    /// [`NoLease`].
    pub fn get(extensions: &Extensions) -> Result<Self, NoLease> {
        extensions.get::<Self>().cloned().ok_or(NoLease)
    }

    /// Declares that the effect begins now: from here on a failure may leave an effect behind. This matters only in a
    /// layer with [`with_explicit_begin`](super::IdempotencyLayer::with_explicit_begin).
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.owner.key()
    }

    /// A key for the next service, the same in every attempt. See
    /// [`Lease::downstream_key`](crate::lease::Lease::downstream_key).
    #[must_use]
    pub fn downstream_key(&self) -> String {
        self.owner.downstream_key()
    }

    /// 1 for the first claim, one more at each take-over.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.owner.attempt
    }

    /// The fencing token. See [`Lease::token`](crate::lease::Lease::token).
    #[must_use]
    pub fn token(&self) -> i64 {
        self.owner.token
    }

    /// Whether the lease is lost. The layer then drops the handler at its next await. A handler with several effects
    /// and no await between them asks before each effect.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.owner.is_lost()
    }
}

#[cfg(feature = "axum")]
impl<S: Sync> axum::extract::FromRequestParts<S> for IdempotentLease {
    type Rejection = NoLease;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, NoLease> {
        Self::get(&parts.extensions)
    }
}

/// A 500 without a body: the text of the mistake is for the service's log.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for NoLease {
    fn into_response(self) -> axum::response::Response {
        tracing::error!(error = &self as &dyn std::error::Error, "a handler cannot have its IdempotentLease");
        http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
