//! A taxi service whose passengers double-click, drive into tunnels, change their minds and have two phones, and get
//! the taxis that they ordered.
//!
//! ```sh
//! cargo run -p demos --bin orders_api # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! [`server`] has the routes, and what stands in front of them in which order; the handlers are in [`orders`], and in
//! [`text`] the one whose effect is outside the database. The client is in this program too: [`booking`], [`changing`],
//! [`texting`] and [`guarding`] are its story, over real sockets, and it exits 0 only if every line of it is as it
//! should be.

mod auth;
mod booking;
mod changing;
mod client;
mod gateway;
mod guarding;
mod order;
mod orders;
mod phone;
mod problem;
mod schema;
mod server;
mod signature;
mod story;
mod text;
mod texting;
mod version;

use std::env;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::timeout;
use uuid::Uuid;

use client::Client;
use gateway::Gateway;
use schema::Schema;
use server::Server;
use story::Story;

const CONNECTIONS: u32 = 8;

/// It takes a second on an idle machine. Past this it does not come to an end.
const LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let ended = match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => start(url),
        _ => Err(demos::on_a_throw_away_server(&[])),
    };
    match ended {
        Ok(story) => story.end(),
        Err(error) => {
            eprintln!("orders_api: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn start(url: String) -> anyhow::Result<Story> {
    if env::args_os().len() > 1 {
        bail!("it takes no arguments");
    }
    // The database may hold what earlier runs have left, and another run may use it now.
    let schema = Schema { url, run: Uuid::new_v4().simple().to_string().split_off(24) };
    schema.create().await?;
    let told = timeout(LIMIT, tell(&schema)).await.context("the story does not come to its end").flatten();
    let dropped = schema.drop().await;
    let told = told?;
    dropped?;
    Ok(told)
}

async fn tell(schema: &Schema) -> anyhow::Result<Story> {
    let gateway = Arc::new(Gateway::default());
    let server = Server::start(schema.pool(CONNECTIONS).await?, gateway.clone()).await?;
    let client = Client::new(server.address, schema.pool(2).await?, schema.run.clone())?;

    let mut story = Story::default();
    booking::tell(&client, &mut story).await?;
    changing::tell(&client, &mut story).await?;
    texting::tell(&client, &gateway, &mut story).await?;
    guarding::tell(&client, &mut story).await?;

    drop(client);
    server.stop().await?;
    Ok(story)
}
