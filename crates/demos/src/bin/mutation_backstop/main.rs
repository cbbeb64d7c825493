//! Proves that one unconditional mark, as the first statement of each mutation, lets each request be applied once, and
//! that a request which was not applied may be sent again.
//!
//! The mutations of a game's inventory are in [`shop`].

mod shop;

use std::process::ExitCode;

use demos::books::Books;
use demos::schema::Schema;
use sqlx::PgPool;

use shop::Mutation::{Find, Sell};
use shop::{apply, apply_in, swords, welcome};

fn main() -> ExitCode {
    demos::program::run("mutation_backstop", shop::TABLES, demo)
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let pool = schema.pool(2).await?;
    repeated(&pool, &schema.scope("ada"), books).await?;
    nothing_to_sell(&pool, &schema.scope("ben"), books).await?;
    in_flight(&pool, &schema.scope("cem"), books).await
}

async fn repeated(pool: &PgPool, ada: &str, books: &mut Books) -> anyhow::Result<()> {
    books.scene("One request, sent twice, and its id on another mutation");
    welcome(pool, ada, 3).await?;
    let answers = [
        apply(pool, ada, "request-1", Sell).await?,
        apply(pool, ada, "request-1", Sell).await?,
        apply(pool, ada, "request-1", Find).await?,
    ];
    books.check("answers", format!("{answers:?}"), "[Applied, AlreadyApplied, AlreadyApplied]");
    books.check("swords left of 3", swords(pool, ada).await?, 2);
    Ok(())
}

/// A sale that fails leaves no mark: the same request may be sent again when there is a sword.
async fn nothing_to_sell(pool: &PgPool, ben: &str, books: &mut Books) -> anyhow::Result<()> {
    books.scene("A request that could not be applied, sent again when it can");
    welcome(pool, ben, 0).await?;
    let answers = [
        apply(pool, ben, "request-1", Sell).await?,
        apply(pool, ben, "request-2", Find).await?,
        apply(pool, ben, "request-1", Sell).await?,
    ];
    books.check("answers", format!("{answers:?}"), "[NothingToSell, Applied, Applied]");
    books.check("swords left of 1", swords(pool, ben).await?, 0);
    Ok(())
}

/// A transaction that is still open may roll back: a client with the answer `AlreadyApplied` would not send it again.
async fn in_flight(pool: &PgPool, cem: &str, books: &mut Books) -> anyhow::Result<()> {
    books.scene("A repeat while the first is in flight, and after it has rolled back");
    welcome(pool, cem, 3).await?;
    let mut open = pool.begin().await?;
    apply_in(&mut open, cem, "request-1", Sell).await?;
    let meanwhile = apply(pool, cem, "request-1", Sell).await?;
    open.rollback().await?;
    let afterwards = apply(pool, cem, "request-1", Sell).await?;
    books.check("answers", format!("{:?}", [meanwhile, afterwards]), "[TryAgain, Applied]");
    books.check("swords left of 3", swords(pool, cem).await?, 2);
    Ok(())
}
