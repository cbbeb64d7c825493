//! The claim of a transactional run. It polls, in a transaction for each poll: a run that waits holds no connection.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgTransaction;
use tokio::time::{Instant, timeout};

use super::request::Ticket;
use super::settings::Settings;
use crate::claim::{Claimed, contend};
use crate::record::{Claim, Record, Terms};
use crate::session::{Polls, begin_pooled};
use crate::{Error, InFlight, Mode, observe};

/// A claim that lost against a concurrent transaction, above READ COMMITTED or to a sweep, starts over this often.
const RETRIES: usize = 3;
/// An answer waits this long for the ROLLBACK, which takes a round trip. A retry that follows at once then finds the
/// key free.
const ROLLBACK_TIME: Duration = Duration::from_secs(1);

/// The transaction that holds the key, and the claim in it.
type Won = (PgTransaction<'static>, Claim);

/// Claims the key, or finds the stored response. Waits for the first request as long as the ticket allows.
pub(super) async fn claim(settings: &Settings, ticket: &Ticket, select_first: bool) -> Result<Claimed<Won>, Error> {
    let started = Instant::now();
    let claimed = contend_and_poll(settings, ticket, select_first).await;
    observe::claimed(Mode::Transaction, ticket.key.operation(), started.elapsed());
    claimed
}

async fn contend_and_poll(settings: &Settings, ticket: &Ticket, select_first: bool) -> Result<Claimed<Won>, Error> {
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
    if select_first && let Some(stored) = record.select_first(&mut *settings.pool.acquire().await?, &terms).await {
        return Ok(Claimed::Replayed(stored));
    }
    let (mut lost, mut asked) = (0, None);
    loop {
        let claimed = claim_once(settings, record, &terms, &mut asked).await;
        match &claimed {
            Err(Error::Retryable(_)) if lost < RETRIES => lost += 1,
            Err(Error::InFlight { .. }) if polls.rest().await => {}
            _ => return claimed,
        }
    }
}

async fn claim_once(
    settings: &Settings,
    record: Record<'_>,
    terms: &Terms,
    asked: &mut Option<DateTime<Utc>>,
) -> Result<Claimed<Won>, Error> {
    let mut transaction = begin_pooled(&settings.pool).await?;
    let lost = match contend(&mut transaction, record, terms, asked).await {
        Ok(Claimed::Won(claim)) => return Ok(Claimed::Won((transaction, claim))),
        Ok(Claimed::Replayed(stored)) => Ok(Claimed::Replayed(stored)),
        Err(error) => Err(error),
    };
    // The connection is free before the response is sent.
    roll_back(transaction).await;
    lost
}

/// A failure to roll back means a broken connection, whose transaction the server rolls back.
///
/// If the handler has dropped the future of a statement, by a time-out of its own, the statement still runs, and the
/// ROLLBACK waits behind it. The answer does not wait for longer than the limit. After that the pool waits, and the key
/// stays in flight for as long as the statement runs.
pub(super) async fn roll_back(transaction: PgTransaction<'static>) {
    let _ = timeout(ROLLBACK_TIME, transaction.rollback()).await;
}
