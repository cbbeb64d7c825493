//! The job that sent one customer ten texts, and the same job under a lease at most once: workers die between handing a
//! text to the gateway and hearing that it was sent, and nobody gets two.
//!
//! ```sh
//! cargo run -p demos --bin sms_at_most_once # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! Both ways to send stand in [`worker`]; what is left for a person to decide, in [`operator`]. The [`gateway`] is a
//! server in this process, and says who is to die: it has the request, and gives no answer until the worker is killed.
//! It exits 0 only if every count is right.

mod crew;
mod gateway;
mod job;
mod operator;
mod schema;
mod sms;
mod tally;
mod worker;

use std::collections::HashMap;
use std::env;
use std::process::ExitCode;

use anyhow::bail;
use tokio::time::Instant;
use uuid::Uuid;

use crew::Crew;
use gateway::{Gateway, Mishap};
use job::Jobs;
use schema::Schema;
use sms::Sms;
use tally::Tally;
use worker::{LEASE, Way};

/// The texts of the second scene; the first has one.
const TEXTS: i64 = 40;

const WORKERS: usize = 3;

/// How often the first scene's worker dies. The tenth text is the one that it survives.
const DEATHS: usize = 9;

fn main() -> ExitCode {
    let ended = match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => start(url),
        _ => Err(demos::on_a_throw_away_server(&[])),
    };
    match ended {
        Ok(wrong) if wrong.is_empty() => ExitCode::SUCCESS,
        Ok(wrong) => {
            wrong.iter().for_each(|wrong| println!("WRONG: {wrong}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("sms_at_most_once: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns what is wrong; an error where it could not come to its end.
#[tokio::main]
async fn start(url: String) -> anyhow::Result<Vec<String>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            // The database may hold what earlier runs have left, and another run may use it now.
            let schema = Schema { url, run: Uuid::new_v4().simple().to_string().split_off(24) };
            schema.create().await?;
            let wrong = demo(&schema).await;
            schema.drop().await?;
            wrong
        }
        ["worker", way, gateway, run] => {
            demos::exit_with_parent();
            worker::work(Way::from_argument(way)?, Sms::new(gateway), Schema { url, run: run.to_owned() }).await?;
            Ok(Vec::new())
        }
        _ => bail!("it takes no arguments"),
    }
}

async fn demo(schema: &Schema) -> anyhow::Result<Vec<String>> {
    let jobs = Jobs { pool: schema.pool(3).await? };
    let mut tally = Tally::default();
    let started = Instant::now();

    println!("without the crate: a job comes again until its text is marked as sent, which is after it was sent");
    let texts = jobs.add(1).await?;
    let mishaps = HashMap::from([(texts[0], vec![Mishap::SenderDies { sent: true }; DEATHS])]);
    let mut gateway = Gateway::start(mishaps).await?;
    let mut crew = Crew::start(1, Way::Naive, &gateway.url, &schema.run)?;
    tally.naive_killed = crew.deliver(&mut gateway, &jobs).await?;
    crew.end().await?;
    tally.naive = gateway.texts(&texts).await;

    println!("\nat most once: the same job under a lease, for {TEXTS} texts");
    let texts = jobs.add(TEXTS).await?;
    let mut gateway = Gateway::start(gateway::mishaps(&texts)).await?;
    let sms = Sms::new(&gateway.url);
    let mut crew = Crew::start(WORKERS, Way::AtMostOnce, &gateway.url, &schema.run)?;
    tally.killed = crew.deliver(&mut gateway, &jobs).await?;
    tally.workers_done = gateway.texts(&texts).await;
    tally.decided = operator::decide(&jobs, &sms, &schema.run).await?;
    tally.killed += crew.deliver(&mut gateway, &jobs).await?;
    crew.end().await?;
    tally.operator_done = gateway.texts(&texts).await;
    tally.replayed = operator::ask_again(&jobs, &sms, &schema.run, &texts).await?;
    tally.asked_again = gateway.texts(&texts).await;
    tally.retried_after = gateway.retried_after().await;

    tally.print();
    let wrong = tally.wrong(LEASE);
    if wrong.is_empty() {
        println!("\nevery count is right, after {:.1} s", started.elapsed().as_secs_f64());
    }
    Ok(wrong)
}
