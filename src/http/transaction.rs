//! The run of a transactional layer: key, effects and response in one transaction.

use std::future::Future;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::{Request, Response};
use sqlx::PgTransaction;
use tokio::time::timeout;

use super::body::Body;
use super::conclusion::{Conclusion, conclude, replayed, succeeded};
use super::idempotent_tx::{Lent, lend};
use super::rejection::{Misconfigured, Rejection};
use super::request::Ticket;
use super::service::{Ended, caught};
use super::settings::Settings;
use crate::claim::{Claimed, contend};
use crate::observe::{call_span, spanned};
use crate::record::{Claim, Record, Terms};
use crate::session::Polls;
use crate::session::Savepoint;
use crate::session::{begin_pooled, commit_unclaimed};
use crate::transaction::complete_and_commit;
use crate::{BoxError, Error, InFlight, Mode, observe};

/// How often a claim that lost against a concurrent transaction, above READ COMMITTED or to a sweep, starts over at once.
const CLAIMS: usize = 3;
/// How long an answer waits for its ROLLBACK, which takes a round trip: so that a retry that follows at once finds the key
/// free.
const ROLLBACK: Duration = Duration::from_secs(1);

/// A request without a key: a transaction of its own, committed for a response below 400.
pub(super) async fn run_unprotected<B, R, E, F>(
    settings: &Settings,
    request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> Result<Response<Body<R>>, Ended<E>>
where
    R: http_body::Body<Data = Bytes>,
    R::Error: Into<BoxError>,
    F: Future<Output = Result<Response<R>, E>>,
{
    let transaction = begin_pooled(&settings.pool).await?;
    let (lent, answered) = lend(settings, transaction, request, handle).await;
    let judged = match answered {
        // Its body is the handler's too, and so is a panic in it.
        Ok(response) => match caught(async || Ok(succeeded(settings, response).await)).await {
            Ok(judged) => judged.map_err(Ended::from),
            Err(ended) => Err(ended),
        },
        Err(ended) => Err(ended),
    };
    match judged {
        Ok((true, response)) => {
            // There is no key to commit with it: here the transaction may be left alone.
            let transaction = to_commit(lent, false).await?;
            commit_unclaimed(transaction).await.map_err(Misconfigured::of_completion)?;
            Ok(response)
        }
        Ok((false, response)) => {
            roll_back_lent(lent).await;
            Ok(response)
        }
        Err(ended) => {
            roll_back_lent(lent).await;
            Err(ended)
        }
    }
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
    let record = Record { key: &ticket.key, deployment: settings.deployment };
    let (mut transaction, claim) = match claim(settings, ticket, in_flight, record).await? {
        Claimed::Won(won) => won,
        Claimed::Replayed(stored) => return Ok((replayed(settings, &ticket.key, stored)?, observe::REPLAYED)),
    };
    let _place = settings.in_flight_here.perform(ticket);
    let savepoint = match settings.stored_errors.is_empty() {
        true => None,
        false => Some(Savepoint::set(&mut transaction, claim.token).await?),
    };

    let started = Instant::now();
    let (lent, answered) = lend(settings, transaction, request, handle).await;
    observe::performed(Mode::Transaction, ticket.key.operation(), started.elapsed());
    let settled = settle(settings, ticket, record, claim, savepoint, lent, answered).await;
    observe::outcome(Mode::Transaction, ticket.key.operation(), outcome(&settled));
    settled
}

async fn settle<R, E>(
    settings: &Settings,
    ticket: &Ticket,
    record: Record<'_>,
    claim: Claim,
    savepoint: Option<Savepoint>,
    lent: Lent,
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
            roll_back_lent(lent).await;
            return Ok((response, observe::FAILED));
        }
        Err(ended) => {
            roll_back_lent(lent).await;
            return Err(ended);
        }
    };
    // A chosen error may come before the transaction is needed, and undoes what is in it.
    let mut transaction = to_commit(lent, settings.transaction_required && !undo).await?;
    if let Some(savepoint) = savepoint.filter(|_| undo)
        && let Err(error) = savepoint.undo(&mut transaction).await
    {
        roll_back(transaction).await;
        return Err(Misconfigured::of_completion(error).into());
    }
    if settings.fewest_round_trips {
        complete_and_commit(transaction, record, claim, &stored).await.map_err(Misconfigured::of_completion)?;
    } else if let Err(error) = record.complete(&mut transaction, claim, &stored).await {
        roll_back(transaction).await;
        return Err(Misconfigured::of_completion(error).into());
    } else {
        transaction.commit().await.map_err(Error::from)?;
    }
    Ok((response, observe::PERFORMED))
}

/// Claims the key, or waits for its first response, a transaction for each poll: who waits holds no connection.
async fn claim(
    settings: &Settings,
    ticket: &Ticket,
    in_flight: InFlight,
    record: Record<'_>,
) -> Result<Claimed<(PgTransaction<'static>, Claim)>, Error> {
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
    let (mut lost, mut asked) = (0, None);
    let mut look_first = settings.select_first;
    let claimed = loop {
        if look_first {
            match settings.pool.acquire().await {
                Ok(mut conn) => {
                    if let Some(stored) = record.select_first(&mut conn, &terms).await {
                        break Ok(Claimed::Replayed(stored));
                    }
                }
                Err(error) => break Err(error.into()),
            }
        }
        let claimed = claim_once(settings, record, &terms, &mut asked).await;
        // A call that waits finds the response by its claim, too.
        look_first = false;
        match &claimed {
            Err(Error::Retryable(_)) if lost < CLAIMS => lost += 1,
            Err(Error::InFlight { .. }) if polls.rest().await => {}
            _ => break claimed,
        }
    };
    observe::claim_ended(&terms, &ticket.key, started, claimed.as_ref());
    claimed
}

async fn claim_once(
    settings: &Settings,
    record: Record<'_>,
    terms: &Terms,
    asked: &mut Option<DateTime<Utc>>,
) -> Result<Claimed<(PgTransaction<'static>, Claim)>, Error> {
    let mut transaction = begin_pooled(&settings.pool).await?;
    match contend(&mut transaction, record, terms, asked).await {
        Ok(Claimed::Won(claim)) => Ok(Claimed::Won((transaction, claim))),
        Ok(Claimed::Replayed(stored)) => {
            // It wrote nothing. Rolled back here, so that the connection is free before the response is.
            roll_back(transaction).await;
            Ok(Claimed::Replayed(stored))
        }
        Err(error) => {
            roll_back(transaction).await;
            Err(error)
        }
    }
}

/// The transaction, where what the handler did with it may be committed.
async fn to_commit(lent: Lent, required: bool) -> Result<PgTransaction<'static>, Misconfigured> {
    let mistake = match lent {
        Lent::GivenBack(transaction) => return Ok(transaction),
        Lent::NeverTaken(transaction) if !required => return Ok(transaction),
        Lent::NeverTaken(_) => Misconfigured::TransactionNotTaken,
        Lent::AskedForAgain(_) => Misconfigured::TransactionTakenAgain,
        Lent::Kept => Misconfigured::TransactionKept,
    };
    roll_back_lent(lent).await;
    Err(mistake)
}

/// Where the handler kept the transaction, it is rolled back when that is dropped.
async fn roll_back_lent(lent: Lent) {
    if let Some(transaction) = lent.into_transaction() {
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
