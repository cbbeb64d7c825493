//! How a call wins or loses a claim. It first tries to claim. If that fails, or if the table is distributed, it looks
//! at the record, and does what the answer says. If an open transaction has the key, it waits for the owner, and looks
//! again.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use super::answer::{Answer, RETRY_AFTER, answer};
use crate::limits::Patience;
use crate::outcome::Response;
use crate::record::{Awaited, Claim, Inserted, Record, Standing, Terms, Tried, wait_for_row};
use crate::{Error, Misuse, observe};

/// How often a call looks without waiting. Each look but the first means that another owner began or ended between two
/// statements of this call, or that a sweep has locked the row. If that goes on, the caller should retry later.
const LOOKS: usize = 10;

/// When a call was made. A record is judged as of this moment: if it expires while the call waits, for a connection or
/// for another request, it is still the call's answer.
pub(crate) struct CalledAt {
    /// By the clock of this process, which shows how long the call has waited.
    since: Instant,
    /// By the database's clock, from the first look.
    at: Option<DateTime<Utc>>,
    /// When the BEGIN of the transaction was sent, if nothing has checked that it began the transaction.
    unchecked_since: Option<Instant>,
}

impl CalledAt {
    pub(crate) fn since(since: Instant) -> Self {
        Self { since, at: None, unchecked_since: None }
    }

    pub(crate) fn in_transaction_since(self, unchecked_since: Option<Instant>) -> Self {
        Self { unchecked_since, ..self }
    }

    pub(crate) fn now() -> Self {
        Self::since(Instant::now())
    }

    fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Fails if the transaction is older than the message that was to begin it: a BEGIN inside a transaction begins
    /// nothing. The server's clock gives one age and the process's clock the other, so the two clocks need not agree.
    /// Only the first statement is judged, because the clocks drift apart during a long wait.
    fn judge(&mut self, age: Duration) -> Result<(), Error> {
        match self.unchecked_since.take() {
            Some(since) if age > since.elapsed() => Err(Error::Misuse(Misuse::NotInTransaction)),
            _ => Ok(()),
        }
    }
}

/// The end of a claim.
pub(crate) enum Claimed<W = Claim> {
    Won(W),
    /// Another call has completed: its response.
    Replayed(Response),
}

/// What a look at the record has led to.
enum Looked {
    Replay(Response),
    Tried(Tried),
}

/// Claims the key, or finds the response of an earlier call with the key.
///
/// No claim waits for another claim, with one exception: that of a lease whose owner committed after this claim's
/// snapshot and is already writing the record again. Only the session's `lock_timeout` bounds this wait.
/// [`Record::await_key`] and [`wait_for_row`] wait within the limit of the terms, and the transaction is usable after
/// them.
///
/// If the call has not [checked](CalledAt::in_transaction_since) that its BEGIN began the transaction,
/// [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction) means that the transaction is older than this BEGIN,
/// and so may be a foreign one.
pub(crate) async fn contend(
    conn: &mut PgConnection,
    record: Record<'_>,
    terms: &Terms,
    asked: &mut CalledAt,
) -> Result<Claimed, Error> {
    // On a distributed table a claim cannot look by itself, so a look comes first. It serves a replay too.
    if !record.deployment.looks_first()
        && let Some(Inserted { claim, age }) = record.claim(conn, terms).await?
    {
        asked.judge(age)?;
        return Ok(Claimed::Won(claim));
    }
    let mut patience = Patience::of(terms.on_duplicate, terms.retention);
    let mut looks = 0;
    while looks < LOOKS {
        looks += 1;
        let tried = match look_and_answer(conn, record, terms, asked).await? {
            Looked::Replay(response) => return Ok(Claimed::Replayed(response)),
            Looked::Tried(tried) => tried,
        };
        match (tried, patience.left()) {
            (Tried::Won(claim), _) => return Ok(Claimed::Won(claim)),
            (Tried::Held, None) => break,
            // The transaction that has locked the row ends soon, and may leave no record. So look again.
            (Tried::Overtaken, _) | (Tried::Locked, None) => continue,
            (Tried::Locked, Some(_)) => wait_for_row(conn, record.deployment).await?,
            (Tried::Held, Some(left)) => match record.await_key(conn, left, asked.at, terms.mode).await? {
                Awaited::Look => {}
                Awaited::Claim => {
                    if let Some(Inserted { claim, .. }) = record.claim(conn, terms).await? {
                        return Ok(Claimed::Won(claim));
                    }
                }
                // One more look, because the owner may have ended at this moment.
                Awaited::TimedOut => patience.end(),
            },
        }
        looks = 0;
    }
    Err(Error::InFlight { retry_after: RETRY_AFTER })
}

async fn look_and_answer(
    conn: &mut PgConnection,
    record: Record<'_>,
    terms: &Terms,
    asked: &mut CalledAt,
) -> Result<Looked, Error> {
    let look = record.look(conn, asked.at, asked.waited()).await?;
    asked.judge(look.age)?;
    asked.at = Some(look.asked);
    let found = match look.standing {
        Standing::Found(found) => found,
        Standing::Held => return Ok(Looked::Tried(Tried::Held)),
        Standing::Free => {
            let claim = record.claim(conn, terms).await?;
            return Ok(Looked::Tried(claim.map_or(Tried::Overtaken, |inserted| Tried::Won(inserted.claim))));
        }
    };
    let (token, trace) = (found.token, found.trace.clone());
    Ok(match answer(found, terms, record.key)? {
        Answer::Replay(response) => {
            observe::replaying(trace.as_deref());
            Looked::Replay(response)
        }
        Answer::TakeOver { attempt } => Looked::Tried(record.take_over(conn, terms, look.asked, token, attempt).await?),
    })
}
