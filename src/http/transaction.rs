//! The run of a transactional layer: key, effects and response in one transaction.

use std::fmt;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Extensions, Request, Response};
use sqlx::{PgConnection, PgTransaction};
use tokio::time::timeout;

use super::body::Body;
use super::conclusion::{Conclusion, conclude, replayed};
use super::layer::Settings;
use super::rejection::{Misconfigured, Rejection};
use super::request::Ticket;
use super::service::{Ended, caught};
use crate::claim::{Claimed, contend, observe_claim};
use crate::error::sqlstate;
use crate::observe::{call_span, spanned};
use crate::poll::Polls;
use crate::record::{Claim, Record, Response as Stored, Terms, Unmet};
use crate::transaction::{Savepoint, begin_pooled, commit_unclaimed};
use crate::{BoxError, Error, InFlight, Key, Mode, observe};

/// How often a claim that lost against a concurrent transaction, above READ COMMITTED or to a sweep, starts over at once.
const CLAIMS: usize = 3;
/// How long an answer waits for its ROLLBACK, which takes a round trip: so that a retry that follows at once finds the key
/// free.
const ROLLBACK: Duration = Duration::from_secs(1);

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
async fn lend<B, R, E, F>(
    transaction: PgTransaction<'static>,
    mut request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> (Option<PgTransaction<'static>>, Result<Response<R>, Ended<E>>)
where
    F: Future<Output = Result<Response<R>, E>>,
{
    let slot = Arc::new(Slot { state: Mutex::new(State::Here(transaction)) });
    request.extensions_mut().insert(Carried(slot.clone()));
    let answered = caught(async || handle(request).await).await;
    let transaction = match slot.swap(State::Closed) {
        State::Here(transaction) => Some(transaction),
        State::Taken | State::Closed => None,
    };
    (transaction, answered)
}

/// A request without a key: a transaction of its own, committed for a response below 400.
pub(super) async fn run_unprotected<B, R, E, F>(
    settings: &Settings,
    request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> Result<Response<Body<R>>, Ended<E>>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    let transaction = begin_pooled(&settings.pool).await?;
    let (transaction, answered) = lend(transaction, request, handle).await;
    let response = answered?;
    let Some(transaction) = transaction else { return Err(Misconfigured::TransactionKept.into()) };
    if response.status().as_u16() < 400 && !super::replay::grpc_failed(response.headers()) {
        commit_unclaimed(transaction).await.map_err(Misconfigured::of_completion)?;
    } else {
        roll_back(transaction).await;
    }
    Ok(response.map(Body::untouched))
}

/// Claims the key, lets the handler perform, stores its response and commits; or replays.
pub(super) async fn run<B, R, E, F>(
    settings: &Settings,
    ticket: &Ticket,
    in_flight: InFlight,
    request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> Result<Response<Body<R>>, Ended<E>>
where
    R: http_body::Body<Data = Bytes>,
    R::Error: Into<BoxError>,
    F: Future<Output = Result<Response<R>, E>>,
{
    let span = call_span!("http.transaction", Mode::Transaction, ticket.key);
    let settled = spanned(span, perform_or_replay(settings, ticket, in_flight, request, handle), outcome).await;
    settled.map(|(response, _)| response)
}

/// As the span of a run has it.
fn outcome<R, E>(settled: &Result<(R, &'static str), Ended<E>>) -> &'static str {
    match settled {
        Ok((_, outcome)) => outcome,
        Err(Ended::Rejected(Rejection::KeyReused)) => "key_reused",
        Err(Ended::Rejected(Rejection::InFlight { .. })) => "in_flight",
        Err(Ended::Rejected(Rejection::Indeterminate { .. })) => "indeterminate",
        Err(_) => observe::FAILED,
    }
}

async fn perform_or_replay<B, R, E, F>(
    settings: &Settings,
    ticket: &Ticket,
    in_flight: InFlight,
    request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> Result<(Response<Body<R>>, &'static str), Ended<E>>
where
    R: http_body::Body<Data = Bytes>,
    R::Error: Into<BoxError>,
    F: Future<Output = Result<Response<R>, E>>,
{
    let record = Record { key: &ticket.key, prepared: settings.prepared };
    let (mut transaction, claim) = match claim(settings, ticket, in_flight, record).await? {
        (transaction, Claimed::Won(claim)) => (transaction, claim),
        (transaction, Claimed::Replayed(stored)) => {
            // It wrote nothing. Rolled back here, so that the connection is free before the response is.
            roll_back(transaction).await;
            return Ok((replayed(settings, &ticket.key, stored)?, observe::REPLAYED));
        }
    };
    let _place = settings.in_flight_here.perform(ticket);
    let savepoint = match settings.stored_errors.is_empty() {
        true => None,
        false => Some(Savepoint::set(&mut transaction, claim.token).await?),
    };

    let started = Instant::now();
    let (transaction, answered) = lend(transaction, request, handle).await;
    observe::performed(Mode::Transaction, ticket.key.operation(), started.elapsed());
    let settled = settle(settings, ticket, record, claim, savepoint, transaction, answered).await;
    observe::outcome(Mode::Transaction, ticket.key.operation(), outcome(&settled));
    settled
}

async fn settle<R, E>(
    settings: &Settings,
    ticket: &Ticket,
    record: Record<'_>,
    claim: Claim,
    savepoint: Option<Savepoint>,
    transaction: Option<PgTransaction<'static>>,
    answered: Result<Response<R>, Ended<E>>,
) -> Result<(Response<Body<R>>, &'static str), Ended<E>>
where
    R: http_body::Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    let concluded = match answered {
        // Its body is the handler's too, and so is a panic in it.
        Ok(response) => match caught(async || Ok(conclude(settings, &ticket.key, response).await)).await {
            Ok(concluded) => concluded.map_err(Ended::from),
            Err(ended) => Err(ended),
        },
        Err(ended) => Err(ended),
    };
    let (stored, response, undo) = match concluded {
        Ok(Conclusion::Store { stored, response, undo }) => (stored, response, undo),
        Ok(Conclusion::Free { response }) => {
            // Where the handler kept the transaction, it is rolled back when that is dropped.
            roll_back_if_any(transaction).await;
            return Ok((response, observe::FAILED));
        }
        Err(ended) => {
            roll_back_if_any(transaction).await;
            return Err(ended);
        }
    };
    let Some(mut transaction) = transaction else { return Err(Misconfigured::TransactionKept.into()) };
    let completed = complete(&mut transaction, record, claim, &stored, savepoint.filter(|_| undo)).await;
    match completed {
        Ok(()) => transaction.commit().await.map_err(Error::from)?,
        Err(error) => {
            roll_back(transaction).await;
            return Err(Misconfigured::of_completion(error).into());
        }
    }
    Ok((response, observe::PERFORMED))
}

async fn complete(
    conn: &mut PgConnection,
    record: Record<'_>,
    claim: Claim,
    stored: &Stored,
    undo: Option<Savepoint>,
) -> Result<(), Error> {
    if let Some(savepoint) = undo {
        savepoint.undo(conn).await?;
    }
    match record.complete(conn, claim, stored).await? {
        Ok(()) => Ok(()),
        Err(Unmet::OutlivedRetention) => Err(Error::OutlivedRetention),
        Err(Unmet::NotInTransaction) => Err(Error::NotInTransaction),
    }
}

/// Claims the key, or waits for its first response, a transaction for each poll: who waits holds no connection.
async fn claim(
    settings: &Settings,
    ticket: &Ticket,
    in_flight: InFlight,
    record: Record<'_>,
) -> Result<(PgTransaction<'static>, Claimed), Error> {
    let terms = Terms {
        mode: Mode::Transaction,
        fingerprint: Some(ticket.fingerprint),
        retention: settings.retention,
        in_flight: InFlight::Reject,
        lease: None,
        max_attempts: None,
    };
    let started = Instant::now();
    let give_up_at = match in_flight {
        InFlight::Reject => started,
        InFlight::Wait(limit) => started + limit,
    };
    let mut polls = Polls::until(give_up_at.into());
    let mut lost = 0;
    let claimed = loop {
        let claimed = claim_once(settings, record, &terms).await;
        match &claimed {
            Err(Error::Retryable(_)) if lost < CLAIMS => lost += 1,
            Err(Error::InFlight { .. }) if polls.rest().await => {}
            _ => break claimed,
        }
    };
    observe_claim(&terms, &ticket.key, started, claimed.as_ref().map(|(_, claimed)| claimed));
    claimed
}

async fn claim_once(
    settings: &Settings,
    record: Record<'_>,
    terms: &Terms,
) -> Result<(PgTransaction<'static>, Claimed), Error> {
    let mut transaction = begin_pooled(&settings.pool).await?;
    match contend(&mut transaction, record, terms).await {
        Ok(claimed) => Ok((transaction, claimed)),
        Err(error) => {
            roll_back(transaction).await;
            Err(match error {
                // A locked row is somebody at work, and the transaction was the layer's own to abort.
                Error::Retryable(error) if sqlstate(&error).as_deref() == Some("55P03") => {
                    Error::InFlight { retry_after: crate::answer::RETRY_AFTER }
                }
                error => error,
            })
        }
    }
}

async fn roll_back_if_any(transaction: Option<PgTransaction<'static>>) {
    if let Some(transaction) = transaction {
        roll_back(transaction).await;
    }
}

/// A failure to roll back is a broken connection, which has rolled back.
///
/// A statement whose future the handler has dropped, by a time-out of its own, still runs, and the ROLLBACK waits behind it.
/// The answer does not: past the limit the pool does the waiting, and the key is in flight for as long as it is true.
async fn roll_back(transaction: PgTransaction<'static>) {
    let _ = timeout(ROLLBACK, transaction.rollback()).await;
}
