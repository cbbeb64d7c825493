//! The transaction in the handler's hands, and the slot through which the layer lends it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use http::Extensions;
use sqlx::{PgConnection, PgTransaction};

use crate::Key;

/// The transaction that holds the key. The handler's writes through it commit together with the response, or not at
/// all.
///
/// It is a `PgConnection`: `sqlx::query(…).execute(&mut *tx)`, and `tx.begin()` for savepoints. With axum it is an
/// extractor; elsewhere [`take`](Self::take) it from the request's extensions. Drop it before the response is returned.
/// Do not send COMMIT or ROLLBACK through it, because the layer would answer 500. The layer lends it once for each
/// request, so code that retries the handler belongs outside the layer.
pub struct IdempotentTx {
    // `None` only during the drop.
    transaction: Option<PgTransaction<'static>>,
    slot: Slot,
    key: Option<Key>,
}

/// The place of the transaction while the handler runs. The request has it in its extensions.
#[derive(Clone)]
pub(super) struct Slot(Arc<Mutex<SlotState>>);

/// Where the transaction is.
pub(super) enum SlotState {
    /// The handler may take it.
    Lent(PgTransaction<'static>),
    /// The handler, or a task that it spawned, has it.
    Taken,
    /// The handler has dropped it. It is not lent again, because the handler's writes are still in it, and a retry of
    /// the handler would write them twice.
    GivenBack(PgTransaction<'static>),
    /// As `GivenBack`, and the handler has asked for it again.
    AskedForAgain(PgTransaction<'static>),
    /// The handler has answered. A transaction that is given back now is rolled back.
    Closed,
}

impl Slot {
    pub(super) fn lend(transaction: PgTransaction<'static>, extensions: &mut Extensions) -> Self {
        let slot = Self(Arc::new(Mutex::new(SlotState::Lent(transaction))));
        extensions.insert(slot.clone());
        slot
    }

    pub(super) fn close(self) -> SlotState {
        self.update(|state| (SlotState::Closed, state))
    }

    fn take(&self) -> Result<PgTransaction<'static>, NoTransaction> {
        self.update(|state| match state {
            SlotState::Lent(transaction) => (SlotState::Taken, Ok(transaction)),
            SlotState::Taken => (SlotState::Taken, Err(NoTransaction::Taken)),
            SlotState::GivenBack(transaction) | SlotState::AskedForAgain(transaction) => {
                (SlotState::AskedForAgain(transaction), Err(NoTransaction::GivenBack))
            }
            SlotState::Closed => (SlotState::Closed, Err(NoTransaction::GivenBack)),
        })
    }

    fn give_back(&self, transaction: PgTransaction<'static>) {
        self.update(|state| match state {
            SlotState::Taken => (SlotState::GivenBack(transaction), ()),
            state => (state, ()),
        });
    }

    fn update<T>(&self, change: impl FnOnce(SlotState) -> (SlotState, T)) -> T {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (changed, result) = change(std::mem::replace(&mut *state, SlotState::Closed));
        *state = changed;
        result
    }
}

/// Why a handler cannot have the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTransaction {
    /// No transactional layer is in front of this handler, or the layer does not cover this method.
    #[error("there is no idempotent transaction here: no transactional IdempotencyLayer covers this request")]
    NotLent,
    /// Another extractor of the same handler, or a task that it spawned, has the transaction.
    #[error("the idempotent transaction is taken, and was not given back")]
    Taken,
    /// The transaction was taken and given back, and the writes of that time are still in it: something inside the
    /// layer calls the handler a second time. The layer then commits nothing, whatever the handler answers: see
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
        let slot: &Slot = extensions.get().ok_or(NoTransaction::NotLent)?;
        Ok(Self { transaction: Some(slot.take()?), slot: slot.clone(), key: extensions.get().cloned() })
    }

    /// The key; `None` for a request [without one](super::IdempotencyLayer::with_optional_key).
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }
}

impl Drop for IdempotentTx {
    fn drop(&mut self) {
        if let Some(transaction) = self.transaction.take() {
            self.slot.give_back(transaction);
        }
    }
}

#[allow(clippy::expect_used, reason = "only Drop takes it out")]
impl Deref for IdempotentTx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.transaction.as_ref().expect("the transaction is there until the drop")
    }
}

#[allow(clippy::expect_used, reason = "only Drop takes it out")]
impl DerefMut for IdempotentTx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.transaction.as_mut().expect("the transaction is there until the drop")
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
        tracing::error!(error = &self as &dyn std::error::Error, "a handler cannot have its IdempotentTx");
        http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
