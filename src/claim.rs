//! How a claim is won or lost: claim, or else look, and do what the answer says.

use std::time::Instant;

use sqlx::PgConnection;

use crate::answer::{Answer, RETRY_AFTER, answer};
use crate::record::{Claim, Record, Terms};
use crate::{Error, InFlight, observe};

/// How often a caller looks again because the record vanished between claim and look, or another one took it over. Each
/// round waits for its owner; a key that turns over faster than that is better retried from outside.
const ROUNDS: usize = 3;

/// What a claim came to.
pub(crate) enum Claimed {
    Won(Claim),
    /// Another call has completed; its response.
    Replayed(Vec<u8>),
}

/// Claims the key, or finds the response of whoever did.
pub(crate) async fn claim(conn: &mut PgConnection, record: Record<'_>, terms: &Terms) -> Result<Claimed, Error> {
    let operation = record.key.operation();
    let started = Instant::now();
    let claimed = contend(conn, record, terms).await;
    observe::claimed(terms.mode, operation, started.elapsed());
    if let Ok(Claimed::Replayed(_)) = &claimed {
        observe::outcome(terms.mode, operation, observe::REPLAYED);
    }
    claimed.map_err(|error| observe::failure(terms.mode, operation, error))
}

async fn contend(conn: &mut PgConnection, record: Record<'_>, terms: &Terms) -> Result<Claimed, Error> {
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
