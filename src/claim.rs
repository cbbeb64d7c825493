//! How a claim is won or lost: claim, or else look, and do what the answer says.

use std::time::Instant;

use sqlx::PgConnection;

use crate::answer::{Answer, RETRY_AFTER, answer};
use crate::fingerprint::Comparison;
use crate::record::{Claim, Record, Response, Terms};
use crate::{Error, InFlight, Key, observe};

/// How often a caller looks again because the record vanished between claim and look, or another one took it over. Each
/// round waits for its owner; a key that turns over faster than that is better retried from outside.
const ROUNDS: usize = 3;

/// What a claim came to.
pub(crate) enum Claimed<W = Claim> {
    Won(W),
    /// Another call has completed; its response.
    Replayed(Response),
}

/// Claims the key, or finds the response of whoever did.
pub(crate) async fn claim(conn: &mut PgConnection, record: Record<'_>, terms: &Terms) -> Result<Claimed, Error> {
    let started = Instant::now();
    let claimed = contend(conn, record, terms).await;
    observe_claim(terms, record.key, started, claimed.as_ref());
    claimed
}

/// Says what a claim came to, with all its polls. A claim that was won is counted when it is settled.
pub(crate) fn observe_claim<W>(terms: &Terms, key: &Key, started: Instant, claimed: Result<&Claimed<W>, &Error>) {
    observe::claimed(terms.mode, key.operation(), started.elapsed());
    match claimed {
        Ok(Claimed::Won(_)) => {}
        Ok(Claimed::Replayed(_)) => observe::outcome(terms.mode, key.operation(), observe::REPLAYED),
        Err(error) => observe::failure(terms.mode, key.operation(), error),
    }
}

/// Looks for a response to replay, before any claim and outside a transaction. Whatever else it meets, an error of an earlier
/// statement's on this connection too, is for the claim to meet again: it knows more.
///
/// Nothing where statements are not kept prepared: sqlx sends such a one in two messages, between which a pooler in transaction
/// mode may go on with another server connection, on which the name stands for another client's statement.
pub(crate) async fn look_first(conn: &mut PgConnection, record: Record<'_>, terms: &Terms) -> Option<Response> {
    if !record.prepared {
        return None;
    }
    let (stored, response) = record.look_first(conn, terms).await.ok()??;
    (terms.fingerprint?.compare(&stored) == Comparison::Same).then_some(response)
}

/// [`claim`], for who polls: counted once, by [`observe_claim`], and not at each poll.
pub(crate) async fn contend(conn: &mut PgConnection, record: Record<'_>, terms: &Terms) -> Result<Claimed, Error> {
    let mut won = record.claim(conn, terms).await?;
    for _ in 0..ROUNDS {
        if let Some(claim) = won {
            return Ok(Claimed::Won(claim));
        }
        let Some(found) = record.look(conn).await? else {
            match terms.in_flight {
                // Claimed and not committed, so not to be seen: that is what the try-lock has found out.
                InFlight::Reject => return Err(Error::InFlight { retry_after: RETRY_AFTER }),
                InFlight::Wait(_) => {
                    won = record.claim(conn, terms).await?;
                    continue;
                }
            }
        };
        let token = found.token;
        won = match answer(found, terms, record.key)? {
            Answer::Replay(response) => return Ok(Claimed::Replayed(response)),
            Answer::TakeOver { attempt } => record.take_over(conn, terms, token, attempt).await?,
        };
    }
    if let Some(claim) = won {
        return Ok(Claimed::Won(claim));
    }
    // A statement that lost has left its own lock_timeout behind: the look puts the caller's back.
    record.look(conn).await?;
    Err(Error::InFlight { retry_after: RETRY_AFTER })
}
