//! The mutations. Each begins with the same statement: the mark of its request.

use std::time::Duration;

use demos::schema::begin_exempt;
use pg_idempotency::mark::{Marked, Marking};
use pg_idempotency::{Error, InFlight, Key};
use sqlx::{PgConnection, PgPool, Postgres, Transaction};

pub(crate) const TABLES: &str = "
    create table inventory (
        player text primary key,
        swords bigint not null check (swords >= 0),
        version bigint not null default 1
    );
";

/// The contract with clients: a request id is remembered for an hour. A later repeat is applied again, so the client's
/// library must give up before that.
const RETENTION: Duration = Duration::from_secs(60 * 60);

/// One name for all mutations, so a request id of one mutation cannot be used for another.
const OPERATION: &str = "mutation";

/// The answer to the client. After `AlreadyApplied` the client fetches the state. After `TryAgain` it sends the same
/// request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Applied { swords: i64 },
    NothingToSell,
    AlreadyApplied,
    TryAgain,
}

#[derive(Clone)]
pub(crate) struct Player {
    /// The scope of the player's request ids.
    pub(crate) name: String,
}

impl Player {
    pub(crate) async fn with_swords(pool: &PgPool, name: String, swords: i64) -> sqlx::Result<Self> {
        let sql = "insert into inventory (player, swords) values ($1::text, $2::int8)";
        // The player is there before the first request.
        let mut tx = begin_exempt(pool).await?;
        sqlx::query(sql).bind(&name).bind(swords).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Self { name })
    }

    /// The player's swords, and the version of their row.
    pub(crate) async fn swords(&self, pool: &PgPool) -> sqlx::Result<(i64, i64)> {
        let sql = "select swords, version from inventory where player = $1::text";
        sqlx::query_as(sql).bind(&self.name).fetch_one(pool).await
    }
}

/// An optimistic check of the version, which many services have. It does not stop a repeat.
pub(crate) async fn sell_if_unchanged(pool: &PgPool, player: &Player, version: i64) -> sqlx::Result<bool> {
    let sql = "
        update inventory
        set swords = swords - 1, version = version + 1
        where player = $1::text and version = $2::int8
    ";
    // The database would refuse a mutation without a mark, and this one shows what happens where nobody does.
    let mut tx = begin_exempt(pool).await?;
    let sold = sqlx::query(sql).bind(&player.name).bind(version).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(sold.rows_affected() == 1)
}

pub(crate) async fn sell(pool: &PgPool, player: &Player, request: &str) -> anyhow::Result<Answer> {
    let mut tx = pool.begin().await?;
    let answer = sell_in(&mut tx, player, request).await?;
    end(tx, answer).await
}

pub(crate) async fn sell_in(conn: &mut PgConnection, player: &Player, request: &str) -> anyhow::Result<Answer> {
    change(conn, player, request, -1).await
}

pub(crate) async fn find_sword(pool: &PgPool, player: &Player, request: &str) -> anyhow::Result<Answer> {
    let mut tx = pool.begin().await?;
    let answer = change(&mut tx, player, request, 1).await?;
    end(tx, answer).await
}

/// A mutation that was not applied must leave no mark.
async fn end(tx: Transaction<'static, Postgres>, answer: Answer) -> anyhow::Result<Answer> {
    match answer {
        Answer::Applied { .. } => pg_idempotency::commit(tx).await?,
        _ => tx.rollback().await?,
    }
    Ok(answer)
}

async fn change(conn: &mut PgConnection, player: &Player, request: &str, swords: i64) -> anyhow::Result<Answer> {
    if let Some(refusal) = backstop(conn, player, request).await? {
        return Ok(refusal);
    }
    let sql = "
        update inventory
        set swords = swords + $2::int8, version = version + 1
        where player = $1::text and swords + $2::int8 >= 0
        returning swords
    ";
    let left: Option<i64> = sqlx::query_scalar(sql).bind(&player.name).bind(swords).fetch_optional(conn).await?;
    Ok(left.map_or(Answer::NothingToSell, |swords| Answer::Applied { swords }))
}

/// The first statement of every mutation, whatever else the mutation checks. `None` means that it may go on.
///
/// It does not wait, because a game's client would rather try again in a moment than hold a connection. The transaction
/// is rolled back after any refusal, so a locked row (`Retryable`) is handled like a request in flight.
async fn backstop(conn: &mut PgConnection, player: &Player, request: &str) -> anyhow::Result<Option<Answer>> {
    let key = Key::new(&player.name, OPERATION, request)?;
    let marking = Marking::new(RETENTION)?.with_in_flight(InFlight::Reject)?;
    match marking.mark(conn, &key).await {
        Ok(Marked::First) => Ok(None),
        Ok(Marked::Duplicate) => Ok(Some(Answer::AlreadyApplied)),
        Err(Error::InFlight { .. } | Error::Retryable(_)) => Ok(Some(Answer::TryAgain)),
        Err(error) => Err(error.into()),
    }
}
