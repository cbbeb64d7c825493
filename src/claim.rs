//! The loop in which a call of any mode wins or loses a claim. The call first tries to claim the key. If the claim
//! inserts no record, the call asks for the response of a replay. If there is none, the call looks at the record, and
//! `answer` decides what the record means. If an open transaction holds the key, the call waits for the end of that
//! transaction, and looks again.

mod answer;
mod swallowed;

use sqlx::PgConnection;

use crate::limits::Patience;
use crate::outcome::StoredResponse;
use crate::record::{CalledAt, Claim, Record, Terms, Tried, pause};
use crate::{Error, observe};

pub(crate) use answer::RETRY_AFTER;
use answer::{Answer, answer};
pub(crate) use swallowed::Swallowed;

/// The greatest number of looks without a wait in between. Each look after the first means that another transaction has
/// claimed, released or locked the record between two statements of this call. After so many looks, the call returns
/// [`Error::InFlight`], so that its caller retries later.
const LOOKS: usize = 10;

/// How a claim ended.
pub(crate) enum Claimed<W = Claim> {
    Won(W),
    /// Another call has completed the operation, with this response.
    Replayed(StoredResponse),
}

/// Claims the key, or finds the response of an earlier call with the key.
///
/// The insert of a claim waits for another transaction in one case: the claim of a lease was committed after the
/// snapshot of this insert, and the owner of the lease is already updating the new record. Only the session's
/// `lock_timeout` bounds this wait. [`Record::await_key`] and [`pause`] wait within the limit of the terms, and
/// leave the transaction usable.
///
/// The call may not yet have [checked](CalledAt::in_transaction_since) that its BEGIN began the transaction. In this
/// case, the function returns [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction) if the transaction is older
/// than the BEGIN. Other code may have begun such a transaction.
///
/// The function returns [`Misuse::ClaimSwallowed`](crate::Misuse::ClaimSwallowed) if the database swallows the claims.
pub(crate) async fn contend(
    conn: &mut PgConnection,
    record: Record<'_>,
    terms: &Terms,
    asked: &mut CalledAt,
) -> Result<Claimed, Error> {
    win_or_lose(conn, record, terms, asked).await.map_err(Error::before_the_work)
}

async fn win_or_lose(
    conn: &mut PgConnection,
    record: Record<'_>,
    terms: &Terms,
    asked: &mut CalledAt,
) -> Result<Claimed, Error> {
    let mut tried = record.claim(conn, terms, asked).await?;
    if matches!(tried, Tried::Unread)
        && let Some(response) = record.response(conn, terms, asked).await?
    {
        return Ok(Claimed::Replayed(response));
    }
    let mut patience = Patience::of(terms.on_duplicate, terms.retention);
    let mut swallowed = Swallowed::default();
    let mut looks = 0;
    loop {
        tried = match tried {
            Tried::Won(claim) => {
                observe::token(claim.token);
                return Ok(Claimed::Won(claim));
            }
            Tried::Unread if looks == LOOKS => break,
            Tried::Unread => {
                looks += 1;
                let looked = record.look(conn, asked).await?;
                if matches!(looked, Tried::Free) {
                    swallowed.found_free(None)?;
                }
                looked
            }
            Tried::Found(found) => {
                let token = found.token;
                match answer(found, terms, record.key)? {
                    Answer::TakeOver { attempt } => {
                        swallowed.found_free(Some(token))?;
                        record.take_over(conn, terms, asked, token, attempt).await?
                    }
                    Answer::Replay(response) => {
                        observe::token(token);
                        return Ok(Claimed::Replayed(response));
                    }
                }
            }
            Tried::Free => record.claim(conn, terms, asked).await?,
            Tried::Held => {
                let Some(left) = patience.left() else { break };
                looks = 0;
                swallowed.forget();
                match record.await_key(conn, left, asked, terms.mode).await? {
                    Tried::Held => {
                        // The wait is over. The call looks once more, because the owner may have ended at this moment.
                        patience.end();
                        Tried::Unread
                    }
                    ended => ended,
                }
            }
            Tried::Locked => {
                swallowed.forget();
                if patience.left().is_some() {
                    looks = 0;
                    pause(conn, record.persistent).await?;
                }
                // The transaction that has locked the row ends soon, and may delete the record. A call that may not
                // wait looks again without a pause, up to `LOOKS` times.
                Tried::Unread
            }
        };
    }
    Err(Error::InFlight { retry_after: RETRY_AFTER })
}
