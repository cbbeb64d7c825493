//! How a claim is won or lost: claim; else look, and do what the answer says; else wait for the owner, and go on.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use super::answer::{Answer, RETRY_AFTER, answer};
use crate::fingerprint::Comparison;
use crate::record::{Awaited, Claim, Record, Response, Standing, TakeOver, Terms, wait_for_row};
use crate::{Error, InFlight, Key, observe};

/// How often a call looks without waiting. Each look but the first means that another owner began or ended between two
/// statements of this call; a key that turns over faster than that is better retried later.
const LOOKS: usize = 10;

/// What a claim came to.
pub(crate) enum Claimed<W = Claim> {
    Won(W),
    /// Another call has completed; its response.
    Replayed(Response),
}

/// Claims the key, or finds the response of the call that did, and counts which.
pub(crate) async fn claim(conn: &mut PgConnection, record: Record<'_>, terms: &Terms) -> Result<Claimed, Error> {
    let started = Instant::now();
    let claimed = contend(conn, record, terms, &mut None).await;
    observe_claim(terms, record.key, started, claimed.as_ref());
    claimed
}

/// Counts what a claim came to, with all its polls. A claim that was won is counted when it is settled.
pub(crate) fn observe_claim<W>(terms: &Terms, key: &Key, started: Instant, claimed: Result<&Claimed<W>, &Error>) {
    observe::claimed(terms.mode, key.operation(), started.elapsed());
    match claimed {
        Ok(Claimed::Won(_)) => {}
        Ok(Claimed::Replayed(_)) => observe::outcome(terms.mode, key.operation(), observe::REPLAYED),
        Err(error) => observe::failure(terms.mode, key.operation(), error),
    }
}

/// [`claim`], uncounted: for callers that poll. `asked` is the time of the call's first look, by the database's clock: a record
/// that expires while a duplicate waits is still that duplicate's answer.
///
/// A claim never waits for another one. Only [`Record::await_key`] waits, for as long as the policy says in all; the
/// transaction is usable after it.
pub(crate) async fn contend(
    conn: &mut PgConnection,
    record: Record<'_>,
    terms: &Terms,
    asked: &mut Option<DateTime<Utc>>,
) -> Result<Claimed, Error> {
    if let Some(claim) = record.claim(conn, terms).await? {
        return Ok(Claimed::Won(claim));
    }
    let mut patience = Patience::of(terms.in_flight);
    // Counted are the looks that followed no wait: that many owners have begun or ended between two statements of this call.
    let mut looks = 0;
    while looks < LOOKS {
        let look = record.look(conn, *asked).await?;
        *asked = Some(look.asked);
        looks += 1;
        let held = match look.standing {
            Standing::Free => match record.claim(conn, terms).await? {
                Some(claim) => return Ok(Claimed::Won(claim)),
                None => continue,
            },
            Standing::Held => Held::Key,
            Standing::Found(found) => {
                let token = found.token;
                let attempt = match answer(found, terms, record.key)? {
                    Answer::Replay(response) => return Ok(Claimed::Replayed(response)),
                    Answer::TakeOver { attempt } => attempt,
                };
                match record.take_over(conn, terms, look.asked, token, attempt).await? {
                    TakeOver::Won(claim) => return Ok(Claimed::Won(claim)),
                    TakeOver::Overtaken => continue,
                    TakeOver::Held => Held::Key,
                    TakeOver::Locked => Held::Row,
                }
            }
        };
        let Some(left) = patience.left() else {
            match held {
                Held::Key => break,
                // A sweep's transaction ends soon, and leaves nothing.
                Held::Row => continue,
            }
        };
        looks = 0;
        match held {
            Held::Row => wait_for_row(conn, record.deployment).await?,
            Held::Key => match record.await_key(conn, left, *asked).await? {
                Awaited::Look => {}
                Awaited::Claim => {
                    if let Some(claim) = record.claim(conn, terms).await? {
                        return Ok(Claimed::Won(claim));
                    }
                }
                // One more look: the owner may have ended at this moment.
                Awaited::TimedOut => patience.end(),
            },
        }
    }
    Err(Error::InFlight { retry_after: RETRY_AFTER })
}

/// What an open transaction holds.
enum Held {
    Key,
    /// The row alone: a sweep's, an operator's, or a large batch of marks.
    Row,
}

/// Until when a call waits.
pub(crate) struct Patience(Option<Instant>);

impl Patience {
    pub(crate) fn of(in_flight: InFlight) -> Self {
        Self(match in_flight {
            InFlight::Reject => None,
            InFlight::Wait(limit) => Some(Instant::now() + limit),
        })
    }

    /// What is left of it; `None` where the call does not wait, or not any more.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.0?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    pub(crate) fn end(&mut self) {
        self.0 = None;
    }
}

/// Looks for a response to replay, before any claim and outside a transaction. Whatever else it meets, an error of an earlier
/// statement on this connection too, the claim meets again and explains.
///
/// Does nothing where statements are not kept prepared: sqlx sends such a statement in two messages, between which a pooler in
/// transaction mode may change the server connection, where the nameless statement is another client's.
pub(crate) async fn select_first(conn: &mut PgConnection, record: Record<'_>, terms: &Terms) -> Option<Response> {
    if !record.deployment.prepared {
        return None;
    }
    let (stored, response) = record.stored_response(conn, terms).await.ok()??;
    (terms.fingerprint?.compare(&stored) == Comparison::Same).then_some(response)
}
