//! The transaction as a handler has it, and the slot in which it is lent.

use std::fmt;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use http::{Extensions, Request, Response};
use sqlx::{PgConnection, PgTransaction};

use super::body::Body;
use super::service::{Ended, handled};
use super::settings::Settings;
use crate::Key;

/// The transaction that holds the key. What a handler writes through it commits with the response, or not at all.
///
/// It is a `PgConnection`: `sqlx::query(…).execute(&mut *tx)`, and `tx.begin()` for savepoints. With axum it is an extractor;
/// elsewhere [`take`](Self::take) it out of the request's extensions. Drop it before the response is returned. Neither
/// COMMIT nor ROLLBACK: the layer would answer 500.
pub struct IdempotentTx {
    // `None` only while it is dropped.
    transaction: Option<PgTransaction<'static>>,
    slot: Arc<Slot>,
    key: Option<Key>,
}

/// Where the transaction is while the handler runs.
#[derive(Default)]
struct Slot {
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    Here(PgTransaction<'static>),
    #[default]
    Taken,
    /// The handler has answered: what comes back now is rolled back.
    Closed,
}

impl Slot {
    fn swap(&self, state: State) -> State {
        std::mem::replace(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner), state)
    }
}

/// The slot as a request carries it.
#[derive(Clone)]
struct Carried(Arc<Slot>);

/// There is no transaction to take: the layer is not in front of this handler, or not for this method, or leases; or the
/// transaction was taken before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no idempotent transaction here: it was taken before, or no transactional IdempotencyLayer takes this method"
)]
pub struct NoTransaction;

impl IdempotentTx {
    /// Takes the transaction.
    ///
    /// # Errors
    ///
    /// [`NoTransaction`].
    pub fn take(extensions: &Extensions) -> Result<Self, NoTransaction> {
        let Carried(slot) = extensions.get::<Carried>().ok_or(NoTransaction)?;
        let mut state = slot.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::take(&mut *state) {
            State::Here(transaction) => {
                Ok(Self { transaction: Some(transaction), slot: slot.clone(), key: extensions.get().cloned() })
            }
            other => {
                *state = other;
                Err(NoTransaction)
            }
        }
    }

    /// The key; `None` for a request [without one](super::IdempotencyLayer::with_optional_key).
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }
}

impl Drop for IdempotentTx {
    fn drop(&mut self) {
        let Some(transaction) = self.transaction.take() else { return };
        let mut state = self.slot.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Taken) {
            *state = State::Here(transaction);
        }
    }
}

#[allow(clippy::expect_used, reason = "only Drop takes it out")]
impl Deref for IdempotentTx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.transaction.as_ref().expect("there until it is dropped")
    }
}

#[allow(clippy::expect_used, reason = "only Drop takes it out")]
impl DerefMut for IdempotentTx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.transaction.as_mut().expect("there until it is dropped")
    }
}

impl fmt::Debug for IdempotentTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotentTx").finish_non_exhaustive()
    }
}

/// Lends the transaction to the handler and takes it back, with what the handler came to. `None` where the handler kept it.
pub(super) async fn lend<B, R, E, F>(
    settings: &Settings,
    transaction: PgTransaction<'static>,
    mut request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> (Option<PgTransaction<'static>>, Result<Response<R>, Ended<E>>)
where
    F: Future<Output = Result<Response<R>, E>>,
{
    let slot = Arc::new(Slot { state: Mutex::new(State::Here(transaction)) });
    request.extensions_mut().insert(Carried(slot.clone()));
    let answered = handled(settings, request, handle).await;
    let transaction = match slot.swap(State::Closed) {
        State::Here(transaction) => Some(transaction),
        State::Taken | State::Closed => None,
    };
    (transaction, answered)
}
