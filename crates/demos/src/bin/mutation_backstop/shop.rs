//! The mutations. Each begins with the same statement: the mark of its request.

use std::time::Duration;

use pg_idempotency::mark::{Marked, Marking};
use pg_idempotency::{Error, InFlight, Key};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

/// The contract with clients: a request id is remembered for an hour. Who repeats one later applies it again, so the
/// client's library must give up before that.
const WINDOW: Duration = Duration::from_secs(60 * 60);

/// One name for all mutations, so that an id which was used for one of them cannot be used for another.
const OPERATION: &str = "mutation";

/// What the client hears. The last two are different: after the one it fetches the state, after the other it sends the
/// same request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Applied { swords: i64 },
    NothingToSell,
    AlreadyApplied,
    TryAgain,
}

#[derive(Clone, Copy)]
pub(crate) struct Player {
    id: Uuid,
}

impl Player {
    pub(crate) async fn with_swords(pool: &PgPool, swords: i64) -> sqlx::Result<Self> {
        let id = Uuid::new_v4();
        sqlx::query("insert into backstop_inventory (player, swords, version) values ($1::uuid, $2::int8, 1)")
            .bind(id)
            .bind(swords)
            .execute(pool)
            .await?;
        Ok(Self { id })
    }

    pub(crate) async fn swords(self, pool: &PgPool) -> sqlx::Result<i64> {
        sqlx::query_scalar("select swords from backstop_inventory where player = $1::uuid")
            .bind(self.id)
            .fetch_one(pool)
            .await
    }

    pub(crate) async fn version(self, pool: &PgPool) -> sqlx::Result<i64> {
        sqlx::query_scalar("select version from backstop_inventory where player = $1::uuid")
            .bind(self.id)
            .fetch_one(pool)
            .await
    }
}

/// `if not exists` alone fails for the later of two processes that start together: they take turns.
pub(crate) async fn create_table(pool: &PgPool) -> sqlx::Result<()> {
    sqlx::raw_sql(
        "
        select pg_advisory_xact_lock(hashtextextended('mutation_backstop', 0));
        create table if not exists backstop_inventory (
            player uuid primary key,
            swords bigint not null check (swords >= 0),
            version bigint not null
        );
        ",
    )
    .execute(pool)
    .await
    .map(drop)
}

/// What many do, and what does not help against a repeat: an optimistic check of the version.
pub(crate) async fn sell_if_unchanged(pool: &PgPool, player: Player, version: i64) -> sqlx::Result<bool> {
    let sold = sqlx::query(
        "update backstop_inventory set swords = swords - 1, version = version + 1 where player = $1::uuid and version = $2::int8",
    )
    .bind(player.id)
    .bind(version)
    .execute(pool)
    .await?;
    Ok(sold.rows_affected() == 1)
}

pub(crate) async fn sell(pool: &PgPool, player: Player, request: &str) -> anyhow::Result<Answer> {
    let mut tx = pool.begin().await?;
    let answer = sell_in(&mut tx, player, request).await?;
    // What was not applied must leave no mark.
    match answer {
        Answer::Applied { .. } => pg_idempotency::commit(tx).await?,
        _ => tx.rollback().await?,
    }
    Ok(answer)
}

pub(crate) async fn sell_in(conn: &mut PgConnection, player: Player, request: &str) -> anyhow::Result<Answer> {
    if let Some(refusal) = backstop(conn, player, request).await? {
        return Ok(refusal);
    }
    let swords: Option<i64> = sqlx::query_scalar(
        "update backstop_inventory set swords = swords - 1, version = version + 1
         where player = $1::uuid and swords > 0 returning swords",
    )
    .bind(player.id)
    .fetch_optional(conn)
    .await?;
    Ok(swords.map_or(Answer::NothingToSell, |swords| Answer::Applied { swords }))
}

pub(crate) async fn find_sword(pool: &PgPool, player: Player, request: &str) -> anyhow::Result<Answer> {
    let mut tx = pool.begin().await?;
    if let Some(refusal) = backstop(&mut tx, player, request).await? {
        tx.rollback().await?;
        return Ok(refusal);
    }
    let swords = sqlx::query_scalar(
        "update backstop_inventory set swords = swords + 1, version = version + 1 where player = $1::uuid returning swords",
    )
    .bind(player.id)
    .fetch_one(&mut *tx)
    .await?;
    pg_idempotency::commit(tx).await?;
    Ok(Answer::Applied { swords })
}

/// The first statement of every mutation, whatever else that checks. `None` says: go on.
///
/// It does not wait, because a game's client rather tries again in a moment than holds a connection. The transaction is
/// rolled back after any refusal, so a row that was locked (`Retryable`) is no different from one in flight.
async fn backstop(conn: &mut PgConnection, player: Player, request: &str) -> anyhow::Result<Option<Answer>> {
    let key = Key::new(player.id.to_string(), OPERATION, request)?;
    let marking = Marking::new(WINDOW)?.with_in_flight(InFlight::Reject)?;
    match marking.mark(conn, &key).await {
        Ok(Marked::First) => Ok(None),
        Ok(Marked::Duplicate) => Ok(Some(Answer::AlreadyApplied)),
        Err(Error::InFlight { .. } | Error::Retryable(_)) => Ok(Some(Answer::TryAgain)),
        Err(error) => Err(error.into()),
    }
}
