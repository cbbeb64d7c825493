//! The run of a transactional layer: it claims the key, lends the transaction to the handler, stores the response and
//! commits.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use http::Extensions;
use sqlx::PgConnection;
use tokio::sync::{Mutex, OwnedMappedMutexGuard, OwnedMutexGuard};
use tokio::time::timeout;
use tracing::Instrument as _;

use super::body::ByteBody;
use super::handler::{Called, Conclusion, Handler, NoResponse, Ran, Reply, conclude};
use super::layer::IdempotencyLayer;
use super::places::Turn;
#[cfg(feature = "axum")]
use super::rejection::cannot_have;
use super::rejection::{Mistake, Rejection};
use super::replay::replay;
use super::request::Ticket;
use crate::claim::Claimed;
use crate::observe::{call_span, claiming, counted};
use crate::outcome::Response as Stored;
use crate::session::{Opening, Polls, Session, bounded, or_closed};
use crate::transaction::{Call, Won};
use crate::{Error, Idempotency, Key, Mode, OnDuplicate, observe};

/// The greatest number of times that a request repeats its claim after a conflict. If the isolation level is above READ
/// COMMITTED, a claim can conflict with a concurrent transaction. A claim can also conflict with a sweep.
const RETRIES: usize = 3;
/// How long an answer waits for the ROLLBACK, which takes a round trip. Because of this wait, an immediate retry finds
/// the key free.
const ROLLBACK_TIME: Duration = Duration::from_secs(1);

/// Runs a request without a key, in a transaction of its own.
pub(super) async fn run_without_key<R: ByteBody, E>(layer: &IdempotencyLayer, handler: Handler<R, E>) -> Reply<R, E> {
    let beginning = async {
        let mut session = Session::of(&layer.pool).await?;
        session.begin(&Opening::Exempt).await?;
        Ok::<_, Error>(session)
    };
    let session = bounded(claim_limit(layer), beginning).await?;
    Ok(perform(layer, session, None, handler).await?.into_response())
}

/// Claims the key, calls the handler, stores its response and commits, or replays a stored response.
pub(super) async fn run<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    options: Idempotency,
    ticket: &Ticket,
    mut turn: Turn<'_>,
    handler: Handler<R, E>,
) -> Reply<R, E> {
    let (mode, operation) = (Mode::Transaction, ticket.key.operation());
    let running = async {
        let claimed = claiming(mode, operation, pin!(claim(layer, options, ticket, &mut turn))).await?;
        match claimed {
            Claimed::Won((session, won)) => {
                turn.hold_key();
                perform(layer, session, Some(won), handler).await
            }
            Claimed::Replayed(stored) => Ok(Ran::Replayed(replay(stored)?)),
        }
    };
    let span = call_span!("http.transaction", mode, ticket.key);
    Ok(counted(mode, operation, pin!(running.instrument(span)), outcome).await?.into_response())
}

fn outcome<R, E>(ran: &Result<Ran<R>, NoResponse<E>>) -> &'static str {
    match ran {
        Ok(Ran::Performed(_)) => observe::PERFORMED,
        Ok(Ran::Replayed(_)) => observe::REPLAYED,
        Err(NoResponse::Rejected(rejection)) => rejection.outcome(),
        Ok(Ran::Failed(_)) | Err(_) => observe::FAILED,
    }
}

/// Claims the key, or finds the stored response. Waits for the first request as long as the options allow.
async fn claim<'k>(
    layer: &IdempotencyLayer,
    options: Idempotency,
    ticket: &'k Ticket,
    turn: &mut Turn<'_>,
) -> Result<Claimed<(Session, Won<'k>)>, Error> {
    let isolated = !layer.stored_errors.is_empty();
    // The call itself does not wait, because a request that waits must hold no connection between two polls.
    let call = Call::new(&options, &ticket.key, ticket.fingerprint, Some(OnDuplicate::Reject), isolated);
    let call = call.made_at(ticket.arrived);
    let mut retries = 0;
    loop {
        match bounded(claim_limit(layer), claim_once(layer, &call)).await {
            Err(Error::Retryable(_)) if retries < RETRIES => retries += 1,
            Err(Error::InFlight { .. }) if turn.rest().await => {}
            claimed => return claimed,
        }
    }
}

/// Claims once, without waiting for another request.
async fn claim_once<'k>(layer: &IdempotencyLayer, call: &Call<'k>) -> Result<Claimed<(Session, Won<'k>)>, Error> {
    let mut session = Session::of(&layer.pool).await?;
    match call.begin(&mut session).await {
        Ok(Claimed::Won(won)) => Ok(Claimed::Won((session, won))),
        Ok(Claimed::Replayed(stored)) => {
            commit_unwatched(layer, session);
            Ok(Claimed::Replayed(stored))
        }
        Err(error) => {
            session.note(&error);
            roll_back(layer, session).await;
            Err(error)
        }
    }
}

/// Lends the transaction to the handler, takes it back, and commits it with the response or rolls it back.
async fn perform<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    session: Session,
    won: Option<Won<'_>>,
    mut handler: Handler<R, E>,
) -> Result<Ran<R>, NoResponse<E>> {
    let key = won.as_ref().map(|won| won.record.key);
    let lender = Lender::of(session, &mut handler.extensions);
    let called = Called::now(&handler, key.is_some());
    let answered = handler.call(layer.run_timeout).await;
    if let Some(key) = key {
        observe::performed(Mode::Transaction, key.operation(), called.at.elapsed());
    }
    // The loan ends before the body is read, so the body cannot use the transaction.
    let lent = lender.end();
    let concluded = match answered {
        Ok(response) => conclude(layer, called, response).await,
        Err(error) => Err(error),
    };
    let undone = match concluded {
        Ok(Conclusion::Store { stored, response, undo }) => {
            // The handler must take the transaction, except in two cases. The response to a request without a key is
            // not stored, so it need not commit with the handler's writes. With `undo`, the status is one of
            // `stored_errors`, and the writes are undone anyway. A handler may find such an error before it needs the
            // transaction.
            let session = committable(layer, lent, key.is_some() && !undo).await?;
            let committing = async move { commit(layer, session, won, &stored, undo).await };
            let committed = or_closed(layer.answer_time(), committing).await;
            committed.unwrap_or_else(|| Err(Rejection::of(Error::Unanswered)))?;
            return Ok(Ran::Performed(response));
        }
        Ok(Conclusion::Free { response }) => Ok(Ran::Failed(response)),
        Err(error) => Err(error),
    };
    if let Some(lent) = lent {
        roll_back(layer, lent.session).await;
    }
    undone
}

/// Returns the transaction. If a mistake of the handler forbids the COMMIT, rolls back and returns the mistake.
async fn committable(layer: &IdempotencyLayer, lent: Option<Lent>, required: bool) -> Result<Session, Mistake> {
    let Lent { session, taken } = lent.ok_or(Mistake::TransactionKept)?;
    let mistake = match taken {
        Taken::Never if required => Mistake::TransactionNotTaken,
        Taken::Again => Mistake::TransactionTakenAgain,
        Taken::Never | Taken::Once => return Ok(session),
    };
    roll_back(layer, session).await;
    Err(mistake)
}

/// Undoes the handler's writes if `undo` is true, stores the response, and commits. If an error occurs, rolls back.
async fn commit(
    layer: &IdempotencyLayer,
    mut session: Session,
    won: Option<Won<'_>>,
    stored: &Stored,
    undo: bool,
) -> Result<(), Rejection> {
    let committed = match won {
        None => session.commit_exempt().await,
        Some(won) => won.undo_and_commit(&mut session, stored, undo).await,
    };
    if let Err(error) = &committed {
        session.note(error);
        roll_back(layer, session).await;
    }
    committed.map_err(Rejection::of_completion)
}

/// Starts a task that commits the transaction of a replay, which has no writes. The answer does not wait for this task.
fn commit_unwatched(layer: &IdempotencyLayer, mut session: Session) {
    if session.is_open() {
        let committing = async move { session.commit().await };
        tokio::spawn(or_closed(layer.answer_time(), committing));
    }
}

/// The longest time for one try to claim: the `acquire_timeout` of the pool, and the time for the statements.
fn claim_limit(layer: &IdempotencyLayer) -> Duration {
    layer.pool.options().get_acquire_timeout().saturating_add(layer.answer_time())
}

/// Rolls back. If the ROLLBACK fails, the connection is broken, and the server rolls back.
///
/// If the handler has dropped the future of a statement, for example by a time-out, the statement still runs. The
/// ROLLBACK waits behind this statement, and the key stays in flight while the statement runs. The answer does not wait
/// longer than [`ROLLBACK_TIME`]. A task continues to wait for the ROLLBACK. If the ROLLBACK takes longer than
/// `answer_time`, this task closes the connection, because the connection may have vanished.
async fn roll_back(layer: &IdempotencyLayer, mut session: Session) {
    let rolling_back = async move { session.roll_back().await };
    let rolling_back = tokio::spawn(or_closed(layer.answer_time(), rolling_back));
    let _ = timeout(ROLLBACK_TIME, rolling_back).await;
}

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
struct Lender(Arc<Mutex<Lent>>);

/// The handler's side of the transaction, in the request's extensions.
#[derive(Clone)]
struct Slot(Weak<Mutex<Lent>>);

struct Lent {
    session: Session,
    taken: Taken,
}

enum Taken {
    Never,
    /// The handler has taken the transaction. The transaction is not lent again, because it has the handler's writes,
    /// and a retry of the handler would write them twice.
    Once,
    /// The handler has dropped the transaction, and tried to take it again.
    Again,
}

impl Lender {
    fn of(session: Session, extensions: &mut Extensions) -> Self {
        let lent = Arc::new(Mutex::new(Lent { session, taken: Taken::Never }));
        extensions.insert(Slot(Arc::downgrade(&lent)));
        Self(lent)
    }

    /// Takes the transaction back. Returns `None` if the handler, or a task that it spawned, still has the transaction.
    /// The transaction is then rolled back when its holder drops it.
    fn end(self) -> Option<Lent> {
        Arc::into_inner(self.0).map(Mutex::into_inner)
    }
}

/// Whether an outer layer lends a transaction for this request.
pub(super) fn is_lent(extensions: &Extensions) -> bool {
    extensions.get::<Slot>().is_some_and(|Slot(lent)| lent.strong_count() > 0)
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
impl<S: Sync> axum::extract::FromRequestParts<S> for IdempotentTx {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, NoTransaction> {
        Self::take(&parts.extensions)
    }
}

/// A 500 without a body, because the text of the mistake is for the service's log.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for NoTransaction {
    fn into_response(self) -> axum::response::Response {
        cannot_have("IdempotentTx", &self)
    }
}
