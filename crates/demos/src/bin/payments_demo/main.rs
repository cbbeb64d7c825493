//! A client of `payments_api`. It sends many duplicates and a changed body, hangs up, and kills the API. At the end it
//! compares the answers with the tables. It exits 0 only if every count is right.
//!
//! `script/demo` builds both and runs this on a throw-away PostgreSQL. It starts the API
//! processes itself and talks to them over real sockets; none of them outlives it.

mod api;
mod audit;
mod client;
mod steps;
mod storm;
mod tally;

use std::env;
use std::process::ExitCode;

use anyhow::Context as _;
use sqlx::postgres::PgPoolOptions;
use uuid::Uuid;

use client::Client;
use tally::{Tally, print_table};

#[tokio::main]
async fn main() -> ExitCode {
    match demo().await {
        Ok(wrong) if wrong.is_empty() => {
            println!("\nevery count is right");
            ExitCode::SUCCESS
        }
        Ok(wrong) => {
            println!();
            wrong.iter().for_each(|wrong| println!("WRONG: {wrong}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("payments_demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns what is wrong; an error where the demo could not come to its end.
async fn demo() -> anyhow::Result<Vec<String>> {
    let url = env::var("DATABASE_URL").context("DATABASE_URL is not set; script/demo brings a server")?;
    let pool = PgPoolOptions::new().max_connections(2).connect(&url).await.context("cannot connect to the database")?;
    // A proof, not a service: every statement is held to the rules of a record. The API finds the table there.
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql(demos::STRICT).execute(&pool).await?;
    // The database may hold payments of earlier runs.
    let client = Client::new(pool, Uuid::new_v4())?;

    let mut steps = Vec::new();
    let ran = steps::run(&client, &mut steps).await;
    print_table(&steps);
    ran?;

    let mut wrong: Vec<String> = steps.iter().filter_map(Tally::wrong).collect();
    audit::audit(&client, &steps, &mut wrong).await?;
    Ok(wrong)
}
