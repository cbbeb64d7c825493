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
/// COMMIT nor ROLLBACK: the layer would answer 500. It is lent once for each request: what retries the handler belongs outside
/// of the layer.
pub struct IdempotentTx {
    // `None` only while it is dropped.
    transaction: Option<PgTransaction<'static>>,
    slot: Arc<Slot>,
    key: Option<Key>,
}

/// Where the transaction is while the handler runs.
struct Slot {
    state: Mutex<State>,
}

enum State {
    Here(PgTransaction<'static>),
    Taken,
    /// By the handler. It is not lent again: what its first borrower has written is still in it, and a retry of the handler
    /// would write that twice.
    GivenBack {
        transaction: PgTransaction<'static>,
        asked_again: bool,
    },
    /// The handler has answered: what comes back now is rolled back.
    Closed,
}

/// What has become of the transaction when the handler has answered.
pub(super) enum Lent {
    NeverTaken(PgTransaction<'static>),
    GivenBack(PgTransaction<'static>),
    /// Given back, and asked for a second time.
    AskedForAgain(PgTransaction<'static>),
    /// The handler, or what it has spawned, still has it.
    Kept,
}

impl Lent {
    /// To be rolled back.
    pub(super) fn into_transaction(self) -> Option<PgTransaction<'static>> {
        match self {
            Self::NeverTaken(transaction) | Self::GivenBack(transaction) | Self::AskedForAgain(transaction) => {
                Some(transaction)
            }
            Self::Kept => None,
        }
    }
}

impl Slot {
    fn swap(&self, state: State) -> State {
        std::mem::replace(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner), state)
    }
}

/// The slot as a request carries it.
#[derive(Clone)]
struct Carried(Arc<Slot>);

/// Why there is no transaction to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTransaction {
    /// The layer is not in front of this handler, or not for this method, or it is a leased one.
    #[error("there is no idempotent transaction here: no transactional IdempotencyLayer takes this method")]
    NotLent,
    /// Somebody has it: another extractor of the same handler, or a task of it.
    #[error("the idempotent transaction is taken, and was not given back")]
    Taken,
    /// It was taken and given back, with what was written then still in it: something inside of the layer calls the handler a
    /// second time. A transaction is lent once. The layer commits nothing, whatever the handler answers: see
    /// [`Misconfigured::TransactionTakenAgain`](super::Misconfigured::TransactionTakenAgain).
    #[error("the idempotent transaction was given back, and is lent once; put what retries outside of the layer")]
    GivenBack,
}

impl IdempotentTx {
    /// Takes the transaction.
    ///
    /// # Errors
    ///
    /// [`NoTransaction`].
    pub fn take(extensions: &Extensions) -> Result<Self, NoTransaction> {
        let Carried(slot) = extensions.get::<Carried>().ok_or(NoTransaction::NotLent)?;
        let mut state = slot.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, taken) = match std::mem::replace(&mut *state, State::Taken) {
            State::Here(transaction) => (State::Taken, Ok(transaction)),
            State::Taken => (State::Taken, Err(NoTransaction::Taken)),
            State::GivenBack { transaction, .. } => {
                (State::GivenBack { transaction, asked_again: true }, Err(NoTransaction::GivenBack))
            }
            State::Closed => (State::Closed, Err(NoTransaction::GivenBack)),
        };
        *state = now;
        Ok(Self { transaction: Some(taken?), slot: slot.clone(), key: extensions.get().cloned() })
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
            *state = State::GivenBack { transaction, asked_again: false };
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

/// Lends the transaction to the handler and takes it back, with what the handler came to.
pub(super) async fn lend<B, R, E, F>(
    settings: &Settings,
    transaction: PgTransaction<'static>,
    mut request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> (Lent, Result<Response<R>, Ended<E>>)
where
    F: Future<Output = Result<Response<R>, E>>,
{
    let slot = Arc::new(Slot { state: Mutex::new(State::Here(transaction)) });
    request.extensions_mut().insert(Carried(slot.clone()));
    let answered = handled(settings, request, handle).await;
    let lent = match slot.swap(State::Closed) {
        State::Here(transaction) => Lent::NeverTaken(transaction),
        State::GivenBack { transaction, asked_again: false } => Lent::GivenBack(transaction),
        State::GivenBack { transaction, asked_again: true } => Lent::AskedForAgain(transaction),
        State::Taken | State::Closed => Lent::Kept,
    };
    (lent, answered)
}
