//! The mutations. Each begins with the same statement: the mark of its request.

use std::time::Duration;

use demos::schema::begin_exempt;
use pg_idempotency::mark::{Marked, Marking};
use pg_idempotency::{Error, InFlight, Key};
use sqlx::{PgConnection, PgPool};

pub(crate) const TABLES: &str = "
    create table inventory (
        player text primary key,
        swords bigint not null check (swords >= 0)
    );
";

/// The contract with clients: a request id is remembered for an hour. A later repeat is applied again, so the client's
/// library must give up before that.
const RETENTION: Duration = Duration::from_secs(60 * 60);

/// One name for all mutations, so a request id of one mutation cannot be used for another.
const OPERATION: &str = "mutation";

/// The answer to the client. After `AlreadyApplied` the client fetches the state. After `TryAgain` it sends the same
/// request again.
#[derive(Debug)]
pub(crate) enum Answer {
    Applied,
    NothingToSell,
    AlreadyApplied,
    TryAgain,
}

#[derive(Clone, Copy)]
pub(crate) enum Mutation {
    Sell,
    Find,
}

pub(crate) async fn welcome(pool: &PgPool, player: &str, swords: i64) -> sqlx::Result<()> {
    let sql = "insert into inventory (player, swords) values ($1::text, $2::int8)";
    // The player is there before the first request.
    let mut tx = begin_exempt(pool).await?;
    sqlx::query(sql).bind(player).bind(swords).execute(&mut *tx).await?;
    tx.commit().await
}

pub(crate) async fn swords(pool: &PgPool, player: &str) -> sqlx::Result<i64> {
    let sql = "select swords from inventory where player = $1::text";
    sqlx::query_scalar(sql).bind(player).fetch_one(pool).await
}

/// The player is the scope of their request ids.
pub(crate) async fn apply(pool: &PgPool, player: &str, request: &str, mutation: Mutation) -> anyhow::Result<Answer> {
    let mut tx = pool.begin().await?;
    let answer = apply_in(&mut tx, player, request, mutation).await?;
    match answer {
        Answer::Applied => pg_idempotency::commit(tx).await?,
        // A mutation that was not applied must leave no mark.
        _ => tx.rollback().await?,
    }
    Ok(answer)
}

pub(crate) async fn apply_in(
    conn: &mut PgConnection,
    player: &str,
    request: &str,
    mutation: Mutation,
) -> anyhow::Result<Answer> {
    if let Some(refusal) = backstop(conn, player, request).await? {
        return Ok(refusal);
    }
    let swords = match mutation {
        Mutation::Sell => -1_i64,
        Mutation::Find => 1,
    };
    let sql = "
        update inventory
        set swords = swords + $2::int8
        where player = $1::text and swords + $2::int8 >= 0
    ";
    let changed = sqlx::query(sql).bind(player).bind(swords).execute(conn).await?.rows_affected();
    Ok(if changed == 0 { Answer::NothingToSell } else { Answer::Applied })
}

/// The first statement of every mutation, whatever else the mutation checks. `None` means that it may go on.
///
/// It does not wait, because a game's client would rather try again in a moment than hold a connection. The transaction
/// is rolled back after any refusal, so a locked row (`Retryable`) is handled like a request in flight.
async fn backstop(conn: &mut PgConnection, player: &str, request: &str) -> anyhow::Result<Option<Answer>> {
    let key = Key::new(player, OPERATION, request)?;
    let marking = Marking::new(RETENTION)?.with_in_flight(InFlight::Reject)?;
    match marking.mark(conn, &key).await {
        Ok(Marked::First) => Ok(None),
        Ok(Marked::Duplicate) => Ok(Some(Answer::AlreadyApplied)),
        Err(Error::InFlight { .. } | Error::Retryable(_)) => Ok(Some(Answer::TryAgain)),
        Err(error) => Err(error.into()),
    }
}
