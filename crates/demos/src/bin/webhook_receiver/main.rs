//! A receiver of webhooks that processes every event once, however often, in whatever order and by whomever it is
//! delivered.
//!
//! ```sh
//! cargo run -p demos --bin webhook_receiver # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! cargo run -p demos --bin webhook_receiver -- 5000 # deliveries, instead of 50000
//! ```
//!
//! The [`receiver`] uses the crate, after [`signature`] has checked the request. The [`sender`] is in this program too.
//! First a [`forger`] sends forged requests, and one client [hangs up](hang_up). Then the sender follows a [`plan`] over
//! real sockets, and [`audit`] compares the counts. The program exits 0 only if every count is right.

mod audit;
mod event;
mod forger;
mod hang_up;
mod plan;
mod queue;
mod receiver;
mod refusal;
mod schema;
mod sender;
mod signature;
mod tally;

use std::env;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use audit::Audit;
use forger::{FORGED, STALE};
use plan::Plan;
use receiver::{Endpoint, Receiver};
use schema::Schema;
use sender::Sender;
use signature::Secret;

const DELIVERIES: usize = 50_000;

/// Below, the forger would have no event of the plan to forge; above, nobody would wait for the end.
const DELIVERIES_RANGE: RangeInclusive<usize> = 1_000..=1_000_000;

/// One for each of the sender's tasks, so that none waits for another's, and some to spare for those that roll back.
const CONNECTIONS: u32 = 12;

/// For a thousand deliveries. A debug build on two idle cores takes 0.6 s, and ten times that where others are busy
/// too; past this, a run does not come to its end.
const LIMIT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let ended = match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => start(url),
        // 35000 commits would time the disk of this machine, for a server that nobody needs after a power cut.
        _ => Err(demos::on_a_throw_away_server(&[("PG_FSYNC", "off")])),
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
            eprintln!("webhook_receiver: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn deliveries() -> anyhow::Result<usize> {
    let mut arguments = env::args().skip(1);
    let deliveries = match arguments.next() {
        Some(argument) => argument.parse().with_context(|| format!("{argument:?} is no number of deliveries"))?,
        None => DELIVERIES,
    };
    ensure!(arguments.next().is_none(), "it takes one argument, the number of deliveries");
    let (least, most) = DELIVERIES_RANGE.into_inner();
    ensure!((least..=most).contains(&deliveries), "the number of deliveries must be between {least} and {most}");
    Ok(deliveries)
}

/// Returns what is wrong; an error where it could not come to its end.
#[tokio::main]
async fn start(url: String) -> anyhow::Result<Vec<String>> {
    let deliveries = deliveries()?;
    // The database may hold what earlier runs have left, and another run may use it now.
    let schema = Schema { url, run: Uuid::new_v4().simple().to_string().split_off(24) };
    schema.create().await?;
    let limit = LIMIT * u32::try_from(deliveries.div_ceil(1000))?;
    let wrong = timeout(limit, demo(&schema, deliveries)).await.context("the demo does not come to its end").flatten();
    let dropped = schema.drop().await;
    let wrong = wrong?;
    dropped?;
    Ok(wrong)
}

async fn demo(schema: &Schema, deliveries: usize) -> anyhow::Result<Vec<String>> {
    let plan = Arc::new(Plan::new(&schema.run, deliveries));
    let secret = Secret::new(b"whsec_shared_with_nobody_else")?;
    let receiver = Receiver::start(Endpoint {
        pool: schema.pool(CONNECTIONS).await?,
        sender: schema.sender(),
        secret: secret.clone(),
        failing: Arc::new(Mutex::new(plan.failing())),
    })
    .await?;
    let sender = Sender::new(receiver.address, secret.clone())?;
    let pool = schema.pool(2).await?;
    let mut audit = Audit::new(pool.clone(), schema.sender(), plan.clone());

    println!("{FORGED} forged and {STALE} stale deliveries, under the ids of events that are still to come …");
    let forged = forger::forge(&sender, &secret, &plan).await?;
    audit.forged(forged).await?;

    println!("a delivery that its sender hangs up on …");
    let hung_up = hang_up::hang_up(&sender, &pool, &plan).await?;

    println!("{} deliveries, with it, of {} events …", plan.deliveries(), plan.events);
    let started = Instant::now();
    let delivered = sender.deliver_all(plan).await?;
    audit.delivered(hung_up, delivered, started.elapsed()).await?;

    drop(sender);
    receiver.stop().await?;
    Ok(audit.wrong)
}
