//! The run of a transactional layer: it claims the key, lends the transaction to the handler, stores the response and
//! commits.

use std::pin::pin;
use std::time::Duration;

use tokio::time::timeout;
use tracing::Instrument as _;

use super::body::ByteBody;
use super::extensions::{Lender, Lent, Taken};
use super::handler::{Called, Conclusion, Handler, NoResponse, Ran, Reply, conclude};
use super::layer::IdempotencyLayer;
use super::places::Turn;
use super::rejection::{Mistake, Rejection};
use super::replay::replay;
use super::request::Ticket;
use crate::claim::Claimed;
use crate::observe::{call_span, counted, timed_claim};
use crate::outcome::StoredResponse;
use crate::record::Opening;
use crate::session::{Polls, Session, bounded, or_closed};
use crate::transaction::{Call, Won};
use crate::{Error, Idempotency, Mode, OnDuplicate, observe};

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
        session.begin(Opening::EXEMPT).await?;
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
        let claimed = timed_claim(mode, operation, pin!(claim(layer, options, ticket, &mut turn))).await?;
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
    // The call itself does not wait, because a request that waits must hold no connection between two polls. The turn
    // of the request waits, as long as `on_duplicate` allows.
    let call = Call::new(&options, &ticket.key, ticket.fingerprint, Some(OnDuplicate::Reject), isolated);
    let call = call.made_at(ticket.arrived);
    let mut retries = 0;
    loop {
        match bounded(claim_limit(layer), claim_once(layer, &call)).await {
            Err(Error::Retryable(_)) if retries < RETRIES => retries += 1,
            Err(Error::InFlight { .. }) if turn.pause().await => {}
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
            // A replay does not wait for the end of its transaction.
            session.send_rollback();
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
    stored: &StoredResponse,
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
