//! The transaction in the handler's hands, and the loan that gives it back.

use std::fmt;
use std::ops::{Deref, DerefMut};
#[cfg(feature = "axum")]
use std::sync::LazyLock;
use std::sync::{Arc, Weak};

use http::Extensions;
use sqlx::PgConnection;
use tokio::sync::{Mutex, OwnedMappedMutexGuard, OwnedMutexGuard};

#[cfg(feature = "axum")]
use super::seldom::Seldom;
use crate::Key;
use crate::session::Session;

/// The transaction that holds the key. What the handler writes through it commits with the response, or not at all.
///
/// It is a `PgConnection`: `sqlx::query(…).execute(&mut *tx)`, and `tx.begin()` for savepoints. With axum it is an
/// extractor; elsewhere [`take`](Self::take) it from the request's extensions. Drop it before the response is returned.
/// Do not send COMMIT or ROLLBACK through it, because the layer would answer 500. The layer lends it once for each
/// request, so code that retries the handler belongs outside the layer.
pub struct IdempotentTx {
    transaction: OwnedMappedMutexGuard<Lent, Session>,
    key: Option<Key>,
}

/// The layer's side of the loan. The handler's transaction keeps the loan alive, too, until it is dropped.
pub(super) struct Loan(Arc<Mutex<Lent>>);

/// The handler's side, in the request's extensions.
#[derive(Clone)]
struct Slot(Weak<Mutex<Lent>>);

pub(super) struct Lent {
    pub(super) session: Session,
    pub(super) loaned: Loaned,
}

pub(super) enum Loaned {
    /// The handler has not taken the transaction.
    Untouched,
    /// The handler has taken it. It is not lent again, because the handler's writes are still in it, and a retry of the
    /// handler would write them twice.
    Taken,
    /// The handler has given it back, and has asked for it again.
    AskedForAgain,
}

impl Loan {
    pub(super) fn of(session: Session, extensions: &mut Extensions) -> Self {
        let lent = Arc::new(Mutex::new(Lent { session, loaned: Loaned::Untouched }));
        extensions.insert(Slot(Arc::downgrade(&lent)));
        Self(lent)
    }

    /// Takes the transaction back. `None` if the handler, or a task that it spawned, still has it: it is then rolled
    /// back when they drop it.
    pub(super) fn end(self) -> Option<Lent> {
        Arc::into_inner(self.0).map(Mutex::into_inner)
    }
}

/// Whether a layer in front lends a transaction for this request.
pub(super) fn is_lent(extensions: &Extensions) -> bool {
    extensions.get::<Slot>().is_some_and(|Slot(lent)| lent.strong_count() > 0)
}

/// Why a handler cannot have the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTransaction {
    /// No transactional layer is in front of this handler, or the layer does not cover this method.
    #[error(
        "there is no idempotent transaction here: no transactional IdempotencyLayer covers this method and route (by default \
         POST and PATCH, of the routes that the Router had when the layer was added)"
    )]
    NotLent,
    /// Another extractor of the same handler, or a task that it spawned, has the transaction.
    #[error("the idempotent transaction is taken, and was not given back")]
    Taken,
    /// Something inside the layer calls the handler a second time. The layer then commits nothing:
    /// [`Misconfigured::TransactionTakenAgain`](super::Misconfigured::TransactionTakenAgain).
    #[error("the idempotent transaction was given back, and is lent once; put the code that retries outside the layer")]
    GivenBack,
}

impl IdempotentTx {
    /// Takes the transaction.
    ///
    /// # Errors
    ///
    /// [`NoTransaction`].
    pub fn take(extensions: &Extensions) -> Result<Self, NoTransaction> {
        let Slot(lent) = extensions.get().ok_or(NoTransaction::NotLent)?;
        let lent = lent.upgrade().ok_or(NoTransaction::GivenBack)?;
        let mut lent = lent.try_lock_owned().map_err(|_| NoTransaction::Taken)?;
        if !matches!(lent.loaned, Loaned::Untouched) {
            lent.loaned = Loaned::AskedForAgain;
            return Err(NoTransaction::GivenBack);
        }
        lent.loaned = Loaned::Taken;
        let transaction = OwnedMutexGuard::map(lent, |lent| &mut lent.session);
        Ok(Self { transaction, key: extensions.get().cloned() })
    }

    /// The key; `None` for a request [without one](super::IdempotencyLayer::optional_key).
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
impl<S: Sync> axum::extract::FromRequestParts<S> for IdempotentTx {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, NoTransaction> {
        Self::take(&parts.extensions)
    }
}

/// A 500 without a body: the text of the mistake is for the service's log.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for NoTransaction {
    fn into_response(self) -> axum::response::Response {
        // Also for a request of anybody, if the route has no layer.
        static LINES: LazyLock<Seldom> = LazyLock::new(Seldom::default);
        if let Some(left_out) = LINES.due(None, &self.to_string()) {
            tracing::error!(
                error = &self as &dyn std::error::Error,
                left_out,
                "a handler cannot have its IdempotentTx"
            );
        }
        http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
