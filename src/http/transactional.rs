//! The run of a transactional layer: claim, call the handler, complete and commit.

use std::time::Duration;

use http::Response;
use sqlx::{PgPool, PgTransaction};
use tokio::time::{Instant, timeout};

use super::body::LayerBody;
use super::conclusion::{Conclusion, conclude};
use super::handler::{Answer, Handler, Unanswered};
use super::idempotent_tx::{Lent, Loan, Stage};
use super::rejection::{Misconfigured, Rejection};
use super::replay::replay;
use super::request::Ticket;
use super::settings::Settings;
use crate::claim::{Claimed, contend};
use crate::observe::{call_span, spanned};
use crate::record::{self, Claim, Record, Terms, compare};
use crate::session::{NotBegun, Opening, Polls, Savepoint, begin_pooled, commit_unclaimed};
use crate::transaction::{claiming, complete_and_commit};
use crate::{Error, InFlight, Key, Mode, observe};

/// A claim that lost against a concurrent transaction, above READ COMMITTED or to a sweep, starts over this often.
const RETRIES: usize = 3;
/// An answer waits this long for the ROLLBACK, which takes a round trip. A retry that follows at once then finds the
/// key free.
const ROLLBACK_TIME: Duration = Duration::from_secs(1);

/// The mode of a layer whose transaction holds the key, made by
/// [`IdempotencyLayer::transactional`](super::IdempotencyLayer::transactional).
#[derive(Clone, Copy, Debug)]
pub struct Transactional {
    pub(super) transaction_required: bool,
    pub(super) select_first: bool,
    pub(super) fewest_round_trips: bool,
}

/// A run with a response.
struct Ran<R> {
    /// For the metrics and the span.
    outcome: &'static str,
    response: Response<LayerBody<R>>,
}

/// A key that the transaction of a run holds.
struct Held<'r> {
    key: &'r Key,
    claim: Claim,
    /// The state before the handler, if some errors are stored.
    savepoint: Option<Savepoint>,
}

/// The transaction that holds the key, and the claim in it.
type Won = (PgTransaction<'static>, Claim);

type Ending<H> = Result<Ran<<H as Handler>::Body>, Unanswered<<H as Handler>::Error>>;

impl Transactional {
    /// Claims the key, calls the handler, stores its response and commits; or replays the stored response. Without a
    /// key, the handler has a transaction of its own.
    pub(super) async fn run<H: Handler>(self, settings: &Settings, ticket: Option<&Ticket>, handler: H) -> Answer<H> {
        let Some(ticket) = ticket else {
            let transaction = begin_pooled(&settings.pool, &Opening::Plain).await.map_err(Error::from)?;
            return Ok(self.perform(settings, transaction, None, handler).await?.response);
        };
        let counted = async {
            let ran = self.perform_or_replay(settings, ticket, handler).await;
            observe::outcome(Mode::Transaction, ticket.key.operation(), outcome(&ran));
            ran
        };
        let span = call_span!("http.transaction", Mode::Transaction, ticket.key);
        Ok(spanned(span, counted, outcome).await?.response)
    }

    async fn perform_or_replay<H: Handler>(self, settings: &Settings, ticket: &Ticket, handler: H) -> Ending<H> {
        let key = &ticket.key;
        let started = Instant::now();
        let claimed = self.claim(settings, ticket).await;
        observe::claimed(Mode::Transaction, key.operation(), started.elapsed());
        let (mut transaction, claim) = match claimed? {
            Claimed::Won(won) => won,
            Claimed::Replayed(stored) => {
                let response = replay(key, stored, settings.seal.as_deref())?;
                return Ok(Ran { outcome: observe::REPLAYED, response });
            }
        };
        let _registered = settings.local.register(key, ticket.fingerprint);
        let savepoint = match settings.stored_errors.is_empty() {
            true => None,
            false => Some(Savepoint::set(&mut transaction, claim.token).await?),
        };
        self.perform(settings, transaction, Some(Held { key, claim, savepoint }), handler).await
    }

    /// Claims the key, or finds the stored response. Waits for the first request as long as the ticket allows.
    async fn claim(self, settings: &Settings, ticket: &Ticket) -> Result<Claimed<Won>, Error> {
        let pool = &settings.pool;
        let mut polls = Polls::until(Instant::now() + ticket.wait);
        let record = Record { key: &ticket.key, deployment: settings.deployment };
        let terms = Terms {
            mode: Mode::Transaction,
            fingerprint: Some(ticket.fingerprint),
            retention: settings.retention,
            in_flight: InFlight::Reject,
            lease: None,
            max_attempts: None,
        };
        if self.select_first
            && let Some(stored) = record.select_first(&mut *pool.acquire().await?, &terms).await
        {
            return Ok(Claimed::Replayed(stored));
        }
        if self.fewest_round_trips
            && !settings.deployment.distributed
            && let Some(claimed) = claim_with_begin(pool, record, &terms).await?
        {
            return Ok(claimed);
        }
        let (mut retries, mut asked) = (0, None);
        loop {
            let mut transaction = begin_pooled(pool, &Opening::Plain).await?;
            let lost = match contend(&mut transaction, record, &terms, &mut asked).await {
                Ok(Claimed::Won(claim)) => return Ok(Claimed::Won((transaction, claim))),
                Ok(Claimed::Replayed(stored)) => Ok(Claimed::Replayed(stored)),
                Err(error) => Err(error),
            };
            // The connection is free before the response is sent.
            roll_back(transaction).await;
            match lost {
                Err(Error::Retryable(_)) if retries < RETRIES => retries += 1,
                Err(Error::InFlight { .. }) if polls.rest().await => {}
                lost => return lost,
            }
        }
    }

    /// Lends the transaction to the handler, takes it back, and commits it with the response or rolls it back.
    async fn perform<H: Handler>(
        self,
        settings: &Settings,
        transaction: PgTransaction<'static>,
        held: Option<Held<'_>>,
        mut handler: H,
    ) -> Ending<H> {
        let key = held.as_ref().map(|held| held.key);
        let loan = Loan::of(transaction, handler.extensions_mut());
        let started = Instant::now();
        let answered = handler.call(settings.run_timeout).await;
        if let Some(key) = key {
            observe::performed(Mode::Transaction, key.operation(), started.elapsed());
        }
        // Ended before the body is read: the body cannot use the transaction.
        let lent = loan.end();
        let concluded = match answered {
            Ok(response) => conclude(settings, key, response).await,
            Err(error) => Err(error),
        };
        let undone = match concluded {
            Ok(Conclusion::Store { stored, response, undo }) => {
                // Without a key, nothing commits with the effects. A chosen error may come before the handler needs the
                // transaction, and undoes its writes anyway.
                let required = self.transaction_required && key.is_some() && !undo;
                let transaction = committable(lent, required).await?;
                match held {
                    None => commit_unclaimed(transaction).await.map_err(Rejection::of_completion)?,
                    Some(held) => self.commit(settings, transaction, held, &stored, undo).await?,
                }
                return Ok(Ran { outcome: observe::PERFORMED, response });
            }
            Ok(Conclusion::Free { response }) => Ok(Ran { outcome: observe::FAILED, response }),
            Err(error) => Err(error),
        };
        if let Some(lent) = lent {
            roll_back(lent.transaction).await;
        }
        undone
    }

    /// Stores the response and commits. `undo`: without the handler's writes.
    async fn commit(
        self,
        settings: &Settings,
        mut transaction: PgTransaction<'static>,
        Held { key, claim, savepoint }: Held<'_>,
        stored: &record::Response,
        undo: bool,
    ) -> Result<(), Rejection> {
        let record = Record { key, deployment: settings.deployment };
        let undone = match savepoint {
            Some(savepoint) if undo => savepoint.undo(&mut transaction).await,
            _ => Ok(()),
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
}

/// Claims in the message that begins. If the key is taken, looks for a stored response. `None` means that the plain way
/// has to find out.
async fn claim_with_begin(pool: &PgPool, record: Record<'_>, terms: &Terms) -> Result<Option<Claimed<Won>>, Error> {
    let (claim, opening) = claiming(record, terms)?;
    match begin_pooled(pool, &opening).await {
        Ok(mut transaction) => match compare(&mut transaction, record.deployment).await {
            Ok(()) => Ok(Some(Claimed::Won((transaction, claim)))),
            Err(error) => {
                roll_back(transaction).await;
                Err(error)
            }
        },
        Err(NotBegun::Taken) => {
            let stored = record.select_first(&mut *pool.acquire().await?, terms).await;
            Ok(stored.map(Claimed::Replayed))
        }
        Err(not_begun) => match Error::from(not_begun) {
            Error::Retryable(_) => Ok(None),
            error => Err(error),
        },
    }
}

/// A failure to roll back means a broken connection, whose transaction the server rolls back.
///
/// If the handler has dropped the future of a statement, by a time-out of its own, the statement still runs, and the
/// ROLLBACK waits behind it. The answer does not wait for longer than the limit. After that the pool waits, and the key
/// stays in flight for as long as the statement runs.
async fn roll_back(transaction: PgTransaction<'static>) {
    let _ = timeout(ROLLBACK_TIME, transaction.rollback()).await;
}

fn outcome<R, E>(ran: &Result<Ran<R>, Unanswered<E>>) -> &'static str {
    match ran {
        Ok(ran) => ran.outcome,
        Err(Unanswered::Rejected(rejection)) => rejection.outcome(),
        Err(_) => observe::FAILED,
    }
}

/// The transaction, unless the handler did something with it that must not be committed.
async fn committable(lent: Option<Lent>, required: bool) -> Result<PgTransaction<'static>, Misconfigured> {
    let Lent { transaction, stage } = lent.ok_or(Misconfigured::TransactionKept)?;
    let mistake = match stage {
        Stage::Untouched if required => Misconfigured::TransactionNotTaken,
        Stage::AskedForAgain => Misconfigured::TransactionTakenAgain,
        Stage::Untouched | Stage::Taken => return Ok(transaction),
    };
    roll_back(transaction).await;
    Err(mistake)
}
