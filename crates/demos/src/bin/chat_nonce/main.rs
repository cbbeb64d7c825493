//! A chat whose clients send a message again, over whichever transport they have, and read it once.
//!
//! ```sh
//! cargo run -p demos --bin chat_nonce # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! `POST /messages` ([`http`]) and the WebSocket `/socket` ([`socket`]) both come down to one function,
//! [`message::create_message`], which uses the crate. The file [`nonce`] describes which nonces are valid. The client is
//! in this program too: its [`steps`] use real sockets. The program exits 0 only if every count is right.

mod client;
mod http;
mod message;
mod nonce;
mod problem;
mod schema;
mod socket;
mod steps;
mod storm;
mod tally;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::timeout;
use uuid::Uuid;

use client::Client;
use http::Server;
use schema::Schema;
use tally::{Tally, print_table};

/// Fewer than the storm has requests: its duplicates queue for a connection, as they would in a service.
const CONNECTIONS: u32 = 16;

/// It takes a second on an idle machine. Past this it does not come to an end.
const LIMIT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let ended = match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => start(url),
        _ => Err(demos::on_a_throw_away_server(&[])),
    };
    match ended {
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
            eprintln!("chat_nonce: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns what is wrong; an error where it could not come to its end.
#[tokio::main]
async fn start(url: String) -> anyhow::Result<Vec<String>> {
    if env::args_os().len() > 1 {
        bail!("it takes no arguments");
    }
    // The database may hold what earlier runs have left, and another run may use it now.
    let schema = Schema { url, run: Uuid::new_v4().simple().to_string().split_off(24) };
    schema.create().await?;
    let wrong = timeout(LIMIT, demo(&schema)).await.context("the demo does not come to its end").flatten();
    let dropped = schema.drop().await;
    let wrong = wrong?;
    dropped?;
    Ok(wrong)
}

async fn demo(schema: &Schema) -> anyhow::Result<Vec<String>> {
    let server = Server::start(schema.pool(CONNECTIONS).await?).await?;
    let client = Client::new(server.address, schema.pool(2).await?, schema.run.clone())?;

    let mut tallies = Vec::new();
    let ran = steps::run(&client, &mut tallies).await;
    print_table(&tallies);
    ran?;

    drop(client);
    server.stop().await?;
    Ok(tallies.iter().filter_map(Tally::wrong).collect())
}
