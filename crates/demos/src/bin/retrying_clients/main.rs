//! The test of the retry loops in src/guide/clients/: each loop, as a reader copies it, brings about one order from a
//! service that fails at first. `script/clients` runs it with the loops in other languages.
//!
//! Every argument is a command that sends one order. It gets the URL, the key and the body as further arguments, and
//! prints the status and the text of the final answer. The loop in Rust always runs.

// The file that the guide shows.
#[path = "../../../../../src/guide/clients/retry.rs"]
mod retry;
mod service;

use std::env;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use demos::books::Books;
use demos::schema::Schema;
use sqlx::PgPool;
use tokio::process::Command;
use uuid::Uuid;

use service::Service;

const TABLES: &str = "create table client_order (id bigint generated always as identity, item text not null)";

fn main() -> ExitCode {
    demos::program::run("retrying_clients", TABLES, demo)
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let pool = schema.pool(10).await?;
    retries_until_one_order(schema, &pool, None, books).await.context("Rust")?;
    for command in env::args().skip(1) {
        retries_until_one_order(schema, &pool, Some(&command), books).await.with_context(|| command.clone())?;
    }
    Ok(())
}

/// A proxy redirects the order to a page. The service limits the account, fails, sends half an answer, loses an answer,
/// and then refuses a duplicate of the running order. `None` is the loop in Rust.
async fn retries_until_one_order(
    schema: &Schema,
    pool: &PgPool,
    command: Option<&str>,
    books: &mut Books,
) -> anyhow::Result<()> {
    books.scene(command.unwrap_or("the loop in Rust"));
    let service = Arc::new(Service::default());
    let url = service.start(pool.clone(), schema.scope("customer")).await?;
    let key = Uuid::new_v4().to_string();
    let item = format!("tea for {key}");

    let (status, text) = send(command, &url, &key, &item).await?;
    books.note("the loop's answer", format!("{status} {text}"));
    books.check("status", status, 201);
    let (status, _) = send(command, &url, &key, "milk").await?;
    books.check("status of another order under the same key", status, 422);
    let mut answers = service.answers().clone();
    // While the first order is in flight, a loop may get several refusals.
    answers.dedup_by(|next, last| next == last && next == "409");
    books.check("the service's answers", answers.join(", "), "a redirect, 429, 500, a half, a cut, 409, a replay, 422");
    let orders: i64 = sqlx::query_scalar("select count(*) from client_order where item like '%' || $1")
        .bind(&key)
        .fetch_one(pool)
        .await?;
    books.check("orders", orders, 1);
    Ok(())
}

async fn send(command: Option<&str>, url: &str, key: &str, item: &str) -> anyhow::Result<(u16, String)> {
    let body = format!("{{\"item\":\"{item}\"}}");
    let Some(command) = command else {
        let http = demos::client::client();
        return retry::send(&http, url, key, &body).await.map_err(anyhow::Error::msg);
    };
    let mut words = command.split(' ');
    let output = Command::new(words.next().context("a program")?)
        .args(words)
        .args([url, key, &body])
        // A proxy for the outside world must not get between this client and 127.0.0.1.
        .envs([("NO_PROXY", "127.0.0.1"), ("no_proxy", "127.0.0.1")])
        .output()
        .await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout)?;
    let (status, text) = printed.trim_end().split_once(' ').context("it printed no answer")?;
    Ok((status.parse()?, text.to_owned()))
}
