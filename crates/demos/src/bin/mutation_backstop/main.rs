//! Proves that one unconditional mark, as the first statement of each mutation, stops repeats that optimistic version
//! checks let through.
//!
//! ```sh
//! cargo run -p demos --bin mutation_backstop # on a temporary PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! The mutations of a game's inventory are in [`shop`].

mod shop;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use demos::books::Books;
use demos::client::storm;
use demos::schema::Schema;
use sqlx::PgPool;
use tokio::task::yield_now;
use uuid::Uuid;

use shop::{Answer, Player};

const LIMIT: Duration = Duration::from_secs(60);

/// More than the pool has connections, so some wait for a connection and some meet the first one's transaction.
const STORM: usize = 64;
const CONNECTIONS: u32 = 16;

fn main() -> ExitCode {
    demos::program::run("mutation_backstop", shop::TABLES, LIMIT, demo)
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let pool = schema.pool(CONNECTIONS).await?;
    let player = async |name: &str, swords| Player::with_swords(&pool, schema.scope(name), swords).await;
    without_a_backstop(&pool, &player("ada", 3).await?, books).await?;
    repeated(&pool, &player("ben", 3).await?, books).await?;
    nothing_to_sell(&pool, &player("cem", 0).await?, books).await?;
    in_flight(&pool, &player("dana", 3).await?, books).await?;
    duplicate_storm(&pool, &player("eva", 100).await?, books).await
}

fn request_id() -> String {
    Uuid::new_v4().to_string()
}

/// The answer to the first sale is lost. The client's library does the usual thing after a version conflict: it reads
/// again and tries again. The new version fits, and the second sword is sold.
async fn without_a_backstop(pool: &PgPool, player: &Player, books: &mut Books) -> anyhow::Result<()> {
    books.scene("Without a back-stop: one sale is meant, its answer is lost, and it is tried again");
    for _attempt in ["the answer is lost", "tried again"] {
        let (_, version) = player.swords(pool).await?;
        ensure!(shop::sell_if_unchanged(pool, player, version).await?, "the version fits");
    }
    books.check("swords left of 3", player.swords(pool).await?.0, 1);
    Ok(())
}

async fn repeated(pool: &PgPool, player: &Player, books: &mut Books) -> anyhow::Result<()> {
    books.scene("One request, sent twice, and its id on another mutation");
    let request = request_id();
    let answers = [shop::sell(pool, player, &request).await?, shop::sell(pool, player, &request).await?];
    books.check("answers", format!("{answers:?}"), "[Applied { swords: 2 }, AlreadyApplied]");
    let reused = shop::find_sword(pool, player, &request).await?;
    books.check("another mutation", format!("{reused:?}"), "AlreadyApplied");
    books.check("swords left of 3", player.swords(pool).await?.0, 2);
    Ok(())
}

/// A sale that fails leaves no mark: the same request may be sent again when there is a sword.
async fn nothing_to_sell(pool: &PgPool, player: &Player, books: &mut Books) -> anyhow::Result<()> {
    books.scene("A request that could not be applied, sent again when it can");
    let request = request_id();
    let answers = [
        shop::sell(pool, player, &request).await?,
        shop::find_sword(pool, player, &request_id()).await?,
        shop::sell(pool, player, &request).await?,
    ];
    books.check("answers", format!("{answers:?}"), "[NothingToSell, Applied { swords: 1 }, Applied { swords: 0 }]");
    Ok(())
}

/// A transaction that is still open may roll back: a client with the answer `AlreadyApplied` would not send it again.
async fn in_flight(pool: &PgPool, player: &Player, books: &mut Books) -> anyhow::Result<()> {
    books.scene("A repeat while the first is in flight, and after it has rolled back");
    let request = request_id();
    let mut open = pool.begin().await?;
    shop::sell_in(&mut open, player, &request).await?;
    let meanwhile = shop::sell(pool, player, &request).await?;
    open.rollback().await?;
    let afterwards = shop::sell(pool, player, &request).await?;
    books.check("meanwhile", format!("{meanwhile:?}"), "TryAgain");
    books.check("afterwards", format!("{afterwards:?}"), "Applied { swords: 2 }");
    Ok(())
}

async fn duplicate_storm(pool: &PgPool, player: &Player, books: &mut Books) -> anyhow::Result<()> {
    books.scene(&format!("{STORM} repeats at once"));
    let (storm_pool, seller, request) = (pool.clone(), player.clone(), request_id());
    let sell = move |_| {
        let (pool, player, request) = (storm_pool.clone(), seller.clone(), request.clone());
        async move {
            loop {
                match shop::sell(&pool, &player, &request).await? {
                    Answer::TryAgain => yield_now().await,
                    answer => return anyhow::Ok(answer),
                }
            }
        }
    };
    let answers: anyhow::Result<Vec<Answer>> = storm(STORM, STORM, sell).await?.into_iter().collect();
    let already = answers?.into_iter().filter(|answer| *answer == Answer::AlreadyApplied).count();
    books.check("already applied", already, STORM - 1);
    books.check("swords left of 100", player.swords(pool).await?.0, 99);
    Ok(())
}
