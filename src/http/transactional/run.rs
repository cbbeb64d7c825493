//! The run of a transactional layer: claim, call the handler, complete and commit.

use std::time::Instant;

use http::Response;
use sqlx::PgTransaction;

use super::claim::{Won, claim, roll_back};
use super::idempotent_tx::{Slot, SlotState};
use crate::claim::Claimed;
use crate::http::body::LayerBody;
use crate::http::conclusion::{Conclusion, conclude};
use crate::http::handler::{Handler, Unanswered};
use crate::http::rejection::{Misconfigured, Rejection};
use crate::http::replay::replay;
use crate::http::request::Ticket;
use crate::http::settings::Settings;
use crate::observe::{call_span, spanned};
use crate::record::{self, Record};
use crate::session::{Savepoint, begin_pooled, commit_unclaimed};
use crate::transaction::complete_and_commit;
use crate::{Error, Key, Mode, observe};

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
    pub(in crate::http) async fn run<H: Handler>(
        self,
        settings: &Settings,
        ticket: &Ticket,
        handler: H,
    ) -> Result<Response<LayerBody<H::Body>>, Unanswered<H::Error>> {
        let counted = async {
            let ran = self.perform_or_replay(settings, ticket, handler).await;
            observe::outcome(Mode::Transaction, ticket.key.operation(), outcome(&ran));
            ran
        };
        let span = call_span!("http.transaction", Mode::Transaction, ticket.key);
        match spanned(span, counted, outcome).await? {
            Ran::Performed(response) | Ran::Undone(response) | Ran::Replayed(response) => Ok(response),
        }
    }

    async fn perform_or_replay<H: Handler>(
        self,
        settings: &Settings,
        ticket: &Ticket,
        handler: H,
    ) -> Result<Ran<H::Body>, Unanswered<H::Error>> {
        let key = &ticket.key;
        let (mut transaction, claim) = match claim(settings, ticket, self.select_first).await? {
            Claimed::Won(won) => won,
            Claimed::Replayed(stored) => return Ok(Ran::Replayed(replay(key, stored, settings.seal.as_deref())?)),
        };
        let _registered = settings.local.register(key, ticket.fingerprint);
        let savepoint = match settings.stored_errors.is_empty() {
            true => None,
            false => Some(Savepoint::set(&mut transaction, claim.token).await?),
        };
        let (slot, conclusion) = perform(settings, Some(key), transaction, handler).await;
        let (stored, response, undo) = match conclusion? {
            Conclusion::Store { stored, response, undo } => (stored, response, undo),
            Conclusion::Free { response } => return Ok(Ran::Undone(response)),
        };
        // A chosen error may come before the handler needs the transaction, and undoes its writes anyway.
        let transaction = committable(slot, self.transaction_required && !undo).await?;
        let record = Record { key, deployment: settings.deployment };
        self.commit((transaction, claim), record, &stored, savepoint.filter(|_| undo)).await?;
        Ok(Ran::Performed(response))
    }

    /// Goes back to the savepoint, if there is one, stores the response and commits.
    async fn commit(
        self,
        (mut transaction, claim): Won,
        record: Record<'_>,
        stored: &record::Response,
        undo: Option<Savepoint>,
    ) -> Result<(), Rejection> {
        let undone = match undo {
            Some(savepoint) => savepoint.undo(&mut transaction).await,
            None => Ok(()),
        };
        let completed = match undone {
            Ok(()) if self.fewest_round_trips => {
                return complete_and_commit(transaction, record, claim, stored).await.map_err(Rejection::of_completion);
            }
            Ok(()) => record.complete(&mut transaction, claim, stored).await,
            Err(error) => Err(error),
        };
        if let Err(error) = completed {
            roll_back(transaction).await;
            return Err(Rejection::of_completion(error));
        }
        transaction.commit().await.map_err(|error| Rejection::of(Error::from(error)))
    }

    /// Runs a request without a key in a transaction of its own, which is committed for a response below 400.
    pub(in crate::http) async fn run_unprotected<H: Handler>(
        self,
        settings: &Settings,
        handler: H,
    ) -> Result<Response<LayerBody<H::Body>>, Unanswered<H::Error>> {
        let transaction = begin_pooled(&settings.pool).await?;
        let (slot, conclusion) = perform(settings, None, transaction, handler).await;
        match conclusion? {
            Conclusion::Store { response, .. } => {
                // No key commits with it, so the handler may leave the transaction alone.
                let transaction = committable(slot, false).await?;
                commit_unclaimed(transaction).await.map_err(Rejection::of_completion)?;
                Ok(response)
            }
            Conclusion::Free { response } => Ok(response),
        }
    }
}

fn outcome<R, E>(ran: &Result<Ran<R>, Unanswered<E>>) -> &'static str {
    match ran {
        Ok(Ran::Performed(_)) => observe::PERFORMED,
        Ok(Ran::Replayed(_)) => observe::REPLAYED,
        Err(Unanswered::Rejected(rejection)) => rejection.outcome(),
        Ok(Ran::Undone(_)) | Err(_) => observe::FAILED,
    }
}

/// Lends the transaction to the handler, takes it back, and judges the response. If that is not to be stored, the
/// transaction is rolled back.
async fn perform<H: Handler>(
    settings: &Settings,
    key: Option<&Key>,
    transaction: PgTransaction<'static>,
    mut handler: H,
) -> (SlotState, Result<Conclusion<H::Body>, Unanswered<H::Error>>) {
    let slot = Slot::lend(transaction, handler.extensions_mut());
    let started = Instant::now();
    let answered = handler.call(settings.run_timeout).await;
    if let Some(key) = key {
        observe::performed(Mode::Transaction, key.operation(), started.elapsed());
    }
    // Closed before the body is read: the body cannot use the transaction.
    let slot = slot.close();
    let conclusion = match answered {
        Ok(response) => conclude(settings, key, response).await,
        Err(error) => Err(error),
    };
    if matches!(conclusion, Ok(Conclusion::Store { .. })) {
        return (slot, conclusion);
    }
    roll_back_slot(slot).await;
    (SlotState::Closed, conclusion)
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
