//! An inventory whose mutations must not be applied twice, whatever the client's library does to be helpful.
//!
//! ```sh
//! cargo run -p demos --bin mutation_backstop # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! First without a backstop: optimistic version checks alone let a retry sell the sword twice, because a retry reads
//! the version again. Then with [`shop::sell`]'s first statement, an unconditional mark of the request's id. It checks
//! itself.

mod shop;

use std::env;
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use uuid::Uuid;

use shop::{Answer, Player};

/// More than the pool has connections, so that some wait for one and some for the first's transaction.
const STORM: usize = 64;

fn main() -> ExitCode {
    let ended = match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => start(&url),
        _ => Err(demos::on_a_throw_away_server(&[])),
    };
    match ended {
        Ok(()) => {
            println!("\nevery count is right");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("mutation_backstop: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn start(url: &str) -> anyhow::Result<()> {
    let pool = PgPoolOptions::new().max_connections(16).connect(url).await.context("cannot connect")?;
    pg_idempotency::migrate(&pool).await?;
    // A proof, not a service: every statement is held to the rules of a record.
    sqlx::raw_sql(demos::STRICT).execute(&pool).await?;
    shop::create_table(&pool).await?;

    without_a_backstop(&pool).await?;
    a_repeat_changes_nothing(&pool).await?;
    an_id_reused_for_another_mutation_is_caught(&pool).await?;
    in_flight_is_not_done(&pool).await?;
    a_storm_sells_once(&pool).await
}

/// The answer to the first sale is lost. The client's library does what it is told about version conflicts: read again,
/// try again. The version fits, and the second sword is gone.
async fn without_a_backstop(pool: &PgPool) -> anyhow::Result<()> {
    let player = Player::with_swords(pool, 3).await?;
    for _attempt in ["the answer is lost", "tried again"] {
        let version = player.version(pool).await?;
        ensure!(shop::sell_if_unchanged(pool, player, version).await?, "the version fits");
    }
    let left = player.swords(pool).await?;
    println!("without a backstop: one sale was meant, {} swords were sold", 3 - left);
    ensure!(left == 1, "the version check alone should have failed to stop the second sale");
    Ok(())
}

async fn a_repeat_changes_nothing(pool: &PgPool) -> anyhow::Result<()> {
    let player = Player::with_swords(pool, 3).await?;
    let request = Uuid::new_v4().to_string();
    let answers = [shop::sell(pool, player, &request).await?, shop::sell(pool, player, &request).await?];
    println!("one request, sent twice: {answers:?}");
    ensure!(answers == [Answer::Applied { swords: 2 }, Answer::AlreadyApplied], "applied once");
    ensure!(player.swords(pool).await? == 2, "one sword was sold");

    // A sale that fails leaves no mark: the same request may be sent again when there is something to sell.
    let poor = Player::with_swords(pool, 0).await?;
    ensure!(shop::sell(pool, poor, &request).await? == Answer::NothingToSell, "nothing to sell");
    shop::find_sword(pool, poor, &Uuid::new_v4().to_string()).await?;
    ensure!(shop::sell(pool, poor, &request).await? == Answer::Applied { swords: 0 }, "and now there is");
    Ok(())
}

/// One operation name for all mutations: the id of a sale cannot find a sword.
async fn an_id_reused_for_another_mutation_is_caught(pool: &PgPool) -> anyhow::Result<()> {
    let player = Player::with_swords(pool, 3).await?;
    let request = Uuid::new_v4().to_string();
    ensure!(shop::sell(pool, player, &request).await? == Answer::Applied { swords: 2 }, "sold");
    let reused = shop::find_sword(pool, player, &request).await?;
    println!("its id on another mutation: {reused:?}");
    ensure!(reused == Answer::AlreadyApplied, "caught");
    ensure!(player.swords(pool).await? == 2, "nothing was found");
    Ok(())
}

/// A transaction that is still open may yet roll back: who is told "already applied" would never send it again.
async fn in_flight_is_not_done(pool: &PgPool) -> anyhow::Result<()> {
    let player = Player::with_swords(pool, 3).await?;
    let request = Uuid::new_v4().to_string();
    let mut open = pool.begin().await?;
    ensure!(shop::sell_in(&mut open, player, &request).await? == Answer::Applied { swords: 2 }, "sold, not committed");
    let meanwhile = shop::sell(pool, player, &request).await?;
    open.rollback().await?;
    let afterwards = shop::sell(pool, player, &request).await?;
    println!("while the first is open: {meanwhile:?}; after it has rolled back: {afterwards:?}");
    ensure!(meanwhile == Answer::TryAgain, "in flight");
    ensure!(afterwards == Answer::Applied { swords: 2 }, "the repeat is the first");
    Ok(())
}

async fn a_storm_sells_once(pool: &PgPool) -> anyhow::Result<()> {
    let player = Player::with_swords(pool, 100).await?;
    let request = Uuid::new_v4().to_string();
    let calls: Vec<_> = (0..STORM)
        .map(|_| {
            let (pool, request) = (pool.clone(), request.clone());
            tokio::spawn(async move {
                loop {
                    // What a client does who is told to try again.
                    match shop::sell(&pool, player, &request).await? {
                        Answer::TryAgain => tokio::task::yield_now().await,
                        answer => return anyhow::Ok(answer),
                    }
                }
            })
        })
        .collect();
    let (mut applied, mut already) = (0, 0);
    for call in calls {
        match call.await?? {
            Answer::Applied { .. } => applied += 1,
            Answer::AlreadyApplied => already += 1,
            other => anyhow::bail!("{other:?}"),
        }
    }
    println!(
        "{STORM} at once: {applied} applied, {already} already applied, {} swords left",
        player.swords(pool).await?
    );
    ensure!((applied, already) == (1, STORM - 1) && player.swords(pool).await? == 99, "one sale");
    Ok(())
}
