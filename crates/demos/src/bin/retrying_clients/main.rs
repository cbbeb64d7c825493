//! The retry loops of src/guide/clients.md against a service that fails: each loop has to bring about one order.
//!
//! ```sh
//! script/clients # extracts the loops in other languages from the document, and passes their commands
//! ```
//!
//! Every argument is a command that sends one order. It gets the URL, the key and the body as further arguments, and
//! prints the status and the text of the final answer. The loop in Rust is always run. It exits 0 only if every count
//! is right.

mod retry;
mod service;

use std::env;
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use sqlx::PgPool;
use tokio::process::Command;
use uuid::Uuid;

use service::{Answered, Service};

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
            eprintln!("retrying_clients: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn start(url: &str) -> anyhow::Result<()> {
    let pool = PgPool::connect(url).await.context("cannot connect")?;
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql(
        "create table if not exists client_order (id bigint generated always as identity, item text not null)",
    )
    .execute(&pool)
    .await?;
    retries_until_one_order(&pool, None).await.context("Rust")?;
    for command in env::args().skip(1) {
        retries_until_one_order(&pool, Some(&command)).await.with_context(|| command.clone())?;
    }
    Ok(())
}

/// The service is overloaded, then loses an answer, then refuses a duplicate of the running order. `None` is the loop
/// in Rust.
async fn retries_until_one_order(pool: &PgPool, command: Option<&str>) -> anyhow::Result<()> {
    let service = Service::start(pool.clone()).await?;
    let key = Uuid::new_v4().to_string();
    let item = format!("tea for {key}");

    let (status, text) = send(command, &service.url, &key, &item).await?;
    let answers = service.answers();
    println!("{}: {answers:?}, then {status} {text}", command.unwrap_or("the loop in Rust"));
    ensure!(status == 201, "the answer is the order's");
    let [Answered::With(503), Answered::Cut, Answered::With(409), .., Answered::Replayed] = answers[..] else {
        anyhow::bail!("the service answered otherwise than planned: {answers:?}");
    };

    let (status, _) = send(command, &service.url, &key, "milk").await?;
    ensure!(status == 422 && service.answers().len() == answers.len() + 1, "a reused key is not retried");
    let orders: i64 = sqlx::query_scalar("select count(*) from client_order where item like '%' || $1")
        .bind(&key)
        .fetch_one(pool)
        .await?;
    ensure!(orders == 1, "{orders} orders");
    Ok(())
}

async fn send(command: Option<&str>, url: &str, key: &str, item: &str) -> anyhow::Result<(u16, String)> {
    let body = format!("{{\"item\":\"{item}\"}}");
    let Some(command) = command else {
        let http = reqwest::Client::builder().no_proxy().build()?;
        return retry::send(&http, url, key, &body).await.map_err(anyhow::Error::msg);
    };
    let mut words = command.split(' ');
    let output = Command::new(words.next().context("a program")?)
        .args(words)
        .args([url, key, &body])
        // A proxy for the outside world has no business between this client and 127.0.0.1.
        .envs([("NO_PROXY", "127.0.0.1"), ("no_proxy", "127.0.0.1")])
        .output()
        .await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout)?;
    let (status, text) = printed.trim_end().split_once(' ').context("it printed no answer")?;
    Ok((status.parse()?, text.to_owned()))
}
