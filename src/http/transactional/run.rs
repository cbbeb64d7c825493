//! The run of a transactional layer: claim, call the handler, complete and commit.

use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response};
use sqlx::PgTransaction;

use super::claim::roll_back;
use super::idempotent_tx::{Slot, SlotState};
use crate::claim::Claimed;
use crate::http::body::LayerBody;
use crate::http::conclusion::{Conclusion, conclude};
use crate::http::handler::{RunError, handled};
use crate::http::misconfigured::Misconfigured;
use crate::http::rejection::Rejection;
use crate::http::replay::replay;
use crate::http::request::Ticket;
use crate::http::settings::Settings;
use crate::observe::{call_span, spanned};
use crate::record::{self, Claim, Record};
use crate::session::{Savepoint, begin_pooled, commit_unclaimed};
use crate::transaction::complete_and_commit;
use crate::{BoxError, Error, InFlight, Mode, observe};

/// The mode of a layer whose transaction holds the key, made by
/// [`IdempotencyLayer::transactional`](crate::http::IdempotencyLayer::transactional).
#[derive(Clone, Copy, Debug)]
pub struct Transactional {
    pub(in crate::http) transaction_required: bool,
    pub(in crate::http) select_first: bool,
    pub(in crate::http) fewest_round_trips: bool,
}

/// How a run with a response ended.
enum Ran<R> {
    Performed(Response<LayerBody<R>>),
    /// The handler failed, and its writes are undone.
    Undone(Response<LayerBody<R>>),
    Replayed(Response<LayerBody<R>>),
}

impl Transactional {
    /// Claims the key, calls the handler, stores its response and commits; or replays the stored response.
    pub(in crate::http) async fn run<B, R, E>(
        self,
        settings: &Settings,
        ticket: &Ticket,
        in_flight: InFlight,
        request: Request<LayerBody<B>>,
        handle: impl AsyncFnOnce(Request<LayerBody<B>>) -> Result<Response<R>, E>,
    ) -> Result<Response<LayerBody<R>>, RunError<E>>
    where
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
    {
        let counted = async {
            let ran = self.perform_or_replay(settings, ticket, in_flight, request, handle).await;
            observe::outcome(Mode::Transaction, ticket.key.operation(), outcome(&ran));
            ran
        };
        let span = call_span!("http.transaction", Mode::Transaction, ticket.key);
        match spanned(span, counted, outcome).await? {
            Ran::Performed(response) | Ran::Undone(response) | Ran::Replayed(response) => Ok(response),
        }
    }

    async fn perform_or_replay<B, R, E>(
        self,
        settings: &Settings,
        ticket: &Ticket,
        in_flight: InFlight,
        request: Request<LayerBody<B>>,
        handle: impl AsyncFnOnce(Request<LayerBody<B>>) -> Result<Response<R>, E>,
    ) -> Result<Ran<R>, RunError<E>>
    where
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
    {
        let key = &ticket.key;
        let started = Instant::now();
        let claimed = self.claim(settings, ticket, in_flight).await;
        observe::claimed(Mode::Transaction, key.operation(), started.elapsed());
        let (mut transaction, claim) = match claimed? {
            Claimed::Won(won) => won,
            Claimed::Replayed(stored) => return Ok(Ran::Replayed(replay(key, stored, settings.seal.as_deref())?)),
        };
        let _registered = settings.local.register(key, ticket.fingerprint);
        let savepoint = match settings.stored_errors.is_empty() {
            true => None,
            false => Some(Savepoint::set(&mut transaction, claim.token).await?),
        };

        let started = Instant::now();
        let (slot, answered) = lend(settings, transaction, request, handle).await;
        observe::performed(Mode::Transaction, key.operation(), started.elapsed());
        match concluded(settings, Some(key), answered).await {
            Ok(Conclusion::Store { stored, response, undo }) => {
                // A chosen error may come before the handler needs the transaction, and undoes its writes anyway.
                let transaction = committable(slot, self.transaction_required && !undo).await?;
                let record = Record { key, deployment: settings.deployment };
                self.commit(transaction, record, claim, &stored, savepoint.filter(|_| undo)).await?;
                Ok(Ran::Performed(response))
            }
            Ok(Conclusion::Free { response }) => {
                roll_back_slot(slot).await;
                Ok(Ran::Undone(response))
            }
            Err(error) => {
                roll_back_slot(slot).await;
                Err(error)
            }
        }
    }

    /// Goes back to the savepoint, if there is one, stores the response and commits.
    async fn commit(
        self,
        mut transaction: PgTransaction<'static>,
        record: Record<'_>,
        claim: Claim,
        stored: &record::Response,
        undo: Option<Savepoint>,
    ) -> Result<(), Rejection> {
        if let Some(savepoint) = undo
            && let Err(error) = savepoint.undo(&mut transaction).await
        {
            roll_back(transaction).await;
            return Err(Rejection::of_completion(error));
        }
        if self.fewest_round_trips {
            return complete_and_commit(transaction, record, claim, stored).await.map_err(Rejection::of_completion);
        }
        if let Err(error) = record.complete(&mut transaction, claim, stored).await {
            roll_back(transaction).await;
            return Err(Rejection::of_completion(error));
        }
        transaction.commit().await.map_err(|error| Rejection::of(Error::from(error)))
    }

    /// Runs a request without a key in a transaction of its own, which is committed for a response below 400.
    pub(in crate::http) async fn run_unprotected<B, R, E>(
        self,
        settings: &Settings,
        request: Request<LayerBody<B>>,
        handle: impl AsyncFnOnce(Request<LayerBody<B>>) -> Result<Response<R>, E>,
    ) -> Result<Response<LayerBody<R>>, RunError<E>>
    where
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
    {
        let transaction = begin_pooled(&settings.pool).await?;
        let (slot, answered) = lend(settings, transaction, request, handle).await;
        match concluded(settings, None, answered).await {
            Ok(Conclusion::Store { response, .. }) => {
                // No key commits with it, so the handler may leave the transaction alone.
                let transaction = committable(slot, false).await?;
                commit_unclaimed(transaction).await.map_err(Rejection::of_completion)?;
                Ok(response)
            }
            Ok(Conclusion::Free { response }) => {
                roll_back_slot(slot).await;
                Ok(response)
            }
            Err(error) => {
                roll_back_slot(slot).await;
                Err(error)
            }
        }
    }
}

fn outcome<R, E>(ran: &Result<Ran<R>, RunError<E>>) -> &'static str {
    match ran {
        Ok(Ran::Performed(_)) => observe::PERFORMED,
        Ok(Ran::Undone(_)) => observe::FAILED,
        Ok(Ran::Replayed(_)) => observe::REPLAYED,
        Err(RunError::Rejected(rejection)) => rejection.outcome(),
        Err(RunError::Failed(_) | RunError::Panicked(_)) => observe::FAILED,
    }
}

/// Lends the transaction to the handler and takes it back, before the body of the response is read.
async fn lend<B, R, E>(
    settings: &Settings,
    transaction: PgTransaction<'static>,
    mut request: Request<LayerBody<B>>,
    handle: impl AsyncFnOnce(Request<LayerBody<B>>) -> Result<Response<R>, E>,
) -> (SlotState, Result<Response<R>, RunError<E>>) {
    let slot = Slot::lend(transaction, request.extensions_mut());
    let answered = handled(settings, request, handle).await;
    (slot.close(), answered)
}

async fn concluded<R, E>(
    settings: &Settings,
    key: Option<&crate::Key>,
    answered: Result<Response<R>, RunError<E>>,
) -> Result<Conclusion<R>, RunError<E>>
where
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    conclude(settings, key, answered?).await
}

/// The transaction, unless the handler did something with it that must not be committed.
async fn committable(slot: SlotState, required: bool) -> Result<PgTransaction<'static>, Misconfigured> {
    let mistake = match slot {
        SlotState::GivenBack(transaction) => return Ok(transaction),
        SlotState::Lent(transaction) if !required => return Ok(transaction),
        SlotState::Lent(_) => Misconfigured::TransactionNotTaken,
        SlotState::AskedForAgain(_) => Misconfigured::TransactionTakenAgain,
        SlotState::Taken | SlotState::Closed => Misconfigured::TransactionKept,
    };
    roll_back_slot(slot).await;
    Err(mistake)
}

/// A transaction that the handler still holds is rolled back when the handler drops it.
async fn roll_back_slot(slot: SlotState) {
    if let SlotState::Lent(transaction) | SlotState::GivenBack(transaction) | SlotState::AskedForAgain(transaction) =
        slot
    {
        roll_back(transaction).await;
    }
}
