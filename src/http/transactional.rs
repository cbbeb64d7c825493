//! The run of a transactional layer: claim, call the handler, complete and commit.

use std::time::Duration;

use http::Response;
use sqlx::{PgConnection, PgTransaction};
use tokio::time::{Instant, timeout};

use super::body::LayerBody;
use super::conclusion::{Conclusion, conclude};
use super::handler::{Answer, Handler, Unanswered};
use super::idempotent_tx::{Lent, Loan, Stage};
use super::rejection::{Misconfigured, Rejection};
use super::replay::replay;
use super::request::Ticket;
use super::settings::Settings;
use crate::claim::{Asked, Claimed, contend};
use crate::observe::{call_span, spanned};
use crate::record::{Claim, Record, Terms};
use crate::response::Response as Stored;
use crate::session::{
    Opening, Polls, answered, begin_pooled, commit_and_chain, commit_unclaimed, commit_unwatched, or_closed,
};
use crate::transaction::{Won, claiming};
use crate::{Error, InFlight, Mode, RoundTrips, observe};

/// A claim that lost against a concurrent transaction, above READ COMMITTED or to a sweep, starts over this often.
const RETRIES: usize = 3;
/// An answer waits this long for the ROLLBACK, which takes a round trip. A retry that follows at once then finds the
/// key free.
const ROLLBACK_TIME: Duration = Duration::from_secs(1);

/// The mode of a layer whose transaction holds the key, made by
/// [`IdempotencyLayer::transactional`](super::IdempotencyLayer::transactional).
#[derive(Clone, Copy, Debug)]
pub struct Transactional {
    pub(super) retention: Duration,
    pub(super) transaction_required: bool,
    pub(super) round_trips: RoundTrips,
}

/// A run with a response.
struct Ran<R> {
    /// For the metrics and the span.
    outcome: &'static str,
    response: Response<LayerBody<R>>,
}

/// The transaction that holds a key.
type Holding<'k> = (PgTransaction<'static>, Won<'k>);

type Ending<H> = Result<Ran<<H as Handler>::Body>, Unanswered<<H as Handler>::Error>>;

impl Transactional {
    /// Claims the key, calls the handler, stores its response and commits; or replays the stored response. Without a
    /// key, the handler has a transaction of its own.
    pub(super) async fn run<H: Handler>(self, settings: &Settings, ticket: Option<&Ticket>, handler: H) -> Answer<H> {
        let Some(ticket) = ticket else {
            let transaction = answered(claim_limit(settings), begin(settings, Opening::Exempt)).await?;
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
        let (transaction, won) = match claimed? {
            Claimed::Won(holding) => holding,
            Claimed::Replayed(stored) => {
                let response = replay(key, stored, settings.seal.as_deref())?;
                return Ok(Ran { outcome: observe::REPLAYED, response });
            }
        };
        let _registered = settings.local.register(key, ticket.fingerprint);
        self.perform(settings, transaction, Some(won), handler).await
    }

    /// Claims the key, or finds the stored response. Waits for the first request as long as the ticket allows.
    async fn claim<'k>(self, settings: &Settings, ticket: &'k Ticket) -> Result<Claimed<Holding<'k>>, Error> {
        let mut polls = Polls::until(Instant::now() + ticket.wait);
        let record = Record { key: &ticket.key, deployment: settings.deployment };
        let terms = Terms {
            mode: Mode::Transaction,
            fingerprint: Some(ticket.fingerprint),
            retention: self.retention,
            in_flight: InFlight::Reject,
            lease: None,
            max_attempts: None,
        };
        let limit = claim_limit(settings);
        if let Some(claimed) = answered(limit, self.claim_in_one_trip(settings, record, &terms)).await? {
            return Ok(claimed);
        }
        let (mut retries, mut asked) = (0, Asked::since(ticket.arrived));
        loop {
            match answered(limit, claim_once(settings, record, &terms, &mut asked)).await {
                Err(Error::Retryable(_)) if retries < RETRIES => retries += 1,
                Err(Error::InFlight { .. }) if polls.rest().await => {}
                claimed => return claimed,
            }
        }
    }

    /// Under the settings that save round trips. `None` means that the plain way has to find out.
    async fn claim_in_one_trip<'k>(
        self,
        settings: &Settings,
        record: Record<'k>,
        terms: &Terms,
    ) -> Result<Option<Claimed<Holding<'k>>>, Error> {
        if self.round_trips == RoundTrips::SelectFirst
            && let Some(stored) = record.select_first(&mut *settings.pool.acquire().await?, terms).await
        {
            return Ok(Some(Claimed::Replayed(stored)));
        }
        if self.round_trips.are_fewest(settings.deployment) {
            return claim_with_begin(settings, record, terms).await;
        }
        Ok(None)
    }

    /// Lends the transaction to the handler, takes it back, and commits it with the response or rolls it back.
    async fn perform<H: Handler>(
        self,
        settings: &Settings,
        transaction: PgTransaction<'static>,
        won: Option<Won<'_>>,
        mut handler: H,
    ) -> Ending<H> {
        let key = won.as_ref().map(|won| won.record.key);
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
                let transaction = committable(settings, lent, required).await?;
                let committing = async move { self.commit(settings, transaction, won, &stored, undo).await };
                let committed = or_closed(settings.answer_time(), committing).await;
                committed.unwrap_or_else(|| Err(Rejection::of(Error::Unanswered)))?;
                return Ok(Ran { outcome: observe::PERFORMED, response });
            }
            Ok(Conclusion::Free { response }) => Ok(Ran { outcome: observe::FAILED, response }),
            Err(error) => Err(error),
        };
        if let Some(lent) = lent {
            roll_back(settings, lent.transaction).await;
        }
        undone
    }

    /// Stores the response and commits. `undo`: without the handler's writes. If this fails before the COMMIT, rolls back.
    async fn commit(
        self,
        settings: &Settings,
        mut transaction: PgTransaction<'static>,
        won: Option<Won<'_>>,
        stored: &Stored,
        undo: bool,
    ) -> Result<(), Rejection> {
        let conn = &mut transaction;
        let committed = match won {
            None => commit_unclaimed(conn).await.map_err(Rejection::of_completion),
            Some(won) => self.complete(conn, won, stored, undo).await,
        };
        match committed {
            Ok(()) => commit_unwatched(transaction, settings.answer_time()),
            Err(_) => roll_back(settings, transaction).await,
        }
        committed
    }

    async fn complete(
        self,
        conn: &mut PgConnection,
        won: Won<'_>,
        stored: &Stored,
        undo: bool,
    ) -> Result<(), Rejection> {
        if undo {
            won.undo(conn).await.map_err(Rejection::of_completion)?;
        }
        if self.round_trips.are_fewest(won.record.deployment) {
            return won.complete_and_chain(conn, stored).await.map_err(Rejection::of_completion);
        }
        won.store(conn, stored).await.map_err(Rejection::of_completion)?;
        commit_and_chain(conn).await.map_err(Rejection::of)
    }
}

/// The longest time for one try to claim: the pool's own time for a connection, and as much as the statements may take.
fn claim_limit(settings: &Settings) -> Duration {
    settings.pool.options().get_acquire_timeout().saturating_add(settings.answer_time())
}

async fn begin(settings: &Settings, opening: Opening) -> Result<PgTransaction<'static>, Error> {
    begin_pooled(&settings.pool, &opening).await?.ok_or(Error::UnknownTransaction)
}

async fn held<'k>(
    settings: &Settings,
    mut transaction: PgTransaction<'static>,
    record: Record<'k>,
    claim: Claim,
) -> Result<Claimed<Holding<'k>>, Error> {
    let won = Won::of(&mut transaction, record, claim, !settings.stored_errors.is_empty()).await?;
    Ok(Claimed::Won((transaction, won)))
}

/// Claims the plain way, without waiting for another request.
async fn claim_once<'k>(
    settings: &Settings,
    record: Record<'k>,
    terms: &Terms,
    asked: &mut Asked,
) -> Result<Claimed<Holding<'k>>, Error> {
    let mut transaction = begin(settings, Opening::Plain).await?;
    match contend(&mut transaction, record, terms, asked).await {
        Ok(Claimed::Won(claim)) => held(settings, transaction, record, claim).await,
        Ok(Claimed::Replayed(stored)) => {
            commit_unwatched(transaction, settings.answer_time());
            Ok(Claimed::Replayed(stored))
        }
        Err(error) => {
            roll_back(settings, transaction).await;
            Err(error)
        }
    }
}

/// Claims in the message that begins. If the key is taken, looks for a stored response. `None` means that the plain way
/// has to find out.
async fn claim_with_begin<'k>(
    settings: &Settings,
    record: Record<'k>,
    terms: &Terms,
) -> Result<Option<Claimed<Holding<'k>>>, Error> {
    let pool = &settings.pool;
    let (claim, opening) = claiming(record, terms)?;
    if let Some(transaction) = begin_pooled(pool, &opening).await? {
        return held(settings, transaction, record, claim).await.map(Some);
    }
    let stored = record.select_first(&mut *pool.acquire().await?, terms).await;
    Ok(stored.map(Claimed::Replayed))
}

/// A failure to roll back means a broken connection, whose transaction the server rolls back.
///
/// If the handler has dropped the future of a statement, by a time-out of its own, the statement still runs, and the
/// ROLLBACK waits behind it. The answer does not wait for longer than [`ROLLBACK_TIME`]. A task waits on, because this
/// connection may also have vanished. At the end of the answer time it closes the connection. The key stays in flight
/// for as long as the statement runs.
async fn roll_back(settings: &Settings, transaction: PgTransaction<'static>) {
    let rolling_back = tokio::spawn(or_closed(settings.answer_time(), transaction.rollback()));
    let _ = timeout(ROLLBACK_TIME, rolling_back).await;
}

fn outcome<R, E>(ran: &Result<Ran<R>, Unanswered<E>>) -> &'static str {
    match ran {
        Ok(ran) => ran.outcome,
        Err(Unanswered::Rejected(rejection)) => rejection.outcome(),
        Err(_) => observe::FAILED,
    }
}

/// The transaction, unless the handler did something with it that must not be committed.
async fn committable(
    settings: &Settings,
    lent: Option<Lent>,
    required: bool,
) -> Result<PgTransaction<'static>, Misconfigured> {
    let Lent { transaction, stage } = lent.ok_or(Misconfigured::TransactionKept)?;
    let mistake = match stage {
        Stage::Untouched if required => Misconfigured::TransactionNotTaken,
        Stage::AskedForAgain => Misconfigured::TransactionTakenAgain,
        Stage::Untouched | Stage::Taken => return Ok(transaction),
    };
    roll_back(settings, transaction).await;
    Err(mistake)
}
