//! A service that books rides in steps, as in Brandur's "Implementing Stripe-like Idempotency Keys in Postgres", while
//! its processes are killed and suspended at random moments, its gateways fail, and some of its clients never come back.
//! Each ride is recorded, charged, receipted and announced by text exactly once.
//!
//! ```sh
//! cargo run -p demos --bin rides # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! cargo run -p demos --bin rides text-not-begun # with a mistake that the audit must find: see the module `mutant`
//! ```
//!
//! [`ride`] is the operation, [`service`] its HTTP route, and a [`worker`] one process of the service. The [`gateways`]
//! are a server in this process. The [`crew`] starts, kills and suspends workers, the customers are in [`client`], the
//! [`operator`] settles what is in doubt, and the [`audit`] compares the counts. The program exits 0 only if every count
//! is right. `tests/rides.rs` tests the service.

mod audit;
mod client;
mod crew;
mod dice;
mod gateways;
mod mutant;
mod operator;
mod outside;
mod ride;
mod schema;
mod service;
mod worker;

use std::env;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use audit::Audit;
use client::Customer;
use crew::Crew;
use gateways::{Gateways, Mishap};
use mutant::Mutant;
use operator::Decided;
use outside::Outside;
use ride::Rides;
use schema::Schema;

const CUSTOMERS: usize = 120;
const WORKERS: usize = 3;
/// The longest time from an effect at a gateway to its answer.
const DELAY: Duration = Duration::from_millis(60);
const FAILS_ONE_IN: u128 = 15;
/// A request, a resumer and a renewal can want a connection at the same time.
const CONNECTIONS: u32 = 10;
/// It takes half a minute on an idle machine. Past this it does not come to an end.
const LIMIT: Duration = Duration::from_secs(300);
/// After the storm, back-off and leases keep a ride waiting for seconds.
const DRAIN_LIMIT: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(100);

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
            eprintln!("rides: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns what is wrong; an error where it could not come to its end.
#[tokio::main]
async fn start(url: String) -> anyhow::Result<Vec<String>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => run(url, None).await,
        ["worker", gateways, run, mutant] => {
            demos::exit_with_parent();
            let mutant = if mutant.is_empty() { None } else { Some(Mutant::named(mutant)?) };
            let rides = rides(&Schema { url, run: run.to_owned() }, gateways, mutant).await?;
            worker::work(rides).await?;
            Ok(Vec::new())
        }
        [mutant] => run(url, Some(Mutant::named(mutant)?)).await,
        _ => bail!("it takes at most one argument, a mutant"),
    }
}

async fn run(url: String, mutant: Option<Mutant>) -> anyhow::Result<Vec<String>> {
    // The database may hold what earlier runs have left, and another run may use it now.
    let schema = Schema { url, run: Uuid::new_v4().simple().to_string().split_off(24) };
    schema.create().await?;
    let wrong = timeout(LIMIT, demo(&schema, mutant)).await;
    schema.drop().await?;
    ensure!(wrong.is_ok(), "after {LIMIT:?} there are rides that are neither booked nor declined");
    wrong?
}

async fn rides(schema: &Schema, gateways: &str, mutant: Option<Mutant>) -> anyhow::Result<Rides> {
    let pool = schema.pool(CONNECTIONS).await?;
    Ok(Rides { pool, outside: Outside::new(gateways), operation: schema.operation(), mutant })
}

async fn demo(schema: &Schema, mutant: Option<Mutant>) -> anyhow::Result<Vec<String>> {
    let started = Instant::now();
    let (gateways, url) = Gateways::start(DELAY, Some(FAILS_ONE_IN)).await?;
    // Chance alone leaves some runs without a text in doubt of each kind.
    for done in [true, false] {
        gateways.fail_next_text(Mishap::NoAnswer { done });
    }
    let rides = rides(schema, &url, mutant).await?;
    let name = mutant.map(Mutant::name).unwrap_or_default();
    let mut crew = Crew::start(WORKERS, ["worker", &url, &schema.run, name].map(str::to_owned)).await?;
    let decided = Arc::new(Decided::default());
    let operator = tokio::spawn({
        let (rides, decided) = (rides.clone(), decided.clone());
        async move { operator::settle(&rides, &decided).await }
    });

    let customers = Customer::all(CUSTOMERS, &schema.run, &crew.addresses);
    let storm = tokio::spawn(client::all_behave(customers.clone()));
    crew.disturb(&gateways, || storm.is_finished() || operator.is_finished()).await?;
    let mut answers = storm.await??;
    println!("{:.1} s: all clients have their answers, or have left", started.elapsed().as_secs_f64());

    let drained = Instant::now() + if mutant.is_some() { DRAIN_LIMIT / 10 } else { DRAIN_LIMIT };
    while audit::unfinished(&rides.pool, &rides.operation).await? > 0 && Instant::now() < drained {
        crew.must_be_alive()?;
        ensure!(!operator.is_finished(), "the operator has given up: {:?}", operator.await?);
        sleep(LOOK).await;
    }
    let left_unfinished = audit::unfinished(&rides.pool, &rides.operation).await?;
    println!("{:.1} s: {left_unfinished} rides are left to finish\n", started.elapsed().as_secs_f64());
    // The customers who never came back ask too.
    for (customer, answers) in customers.iter().zip(&mut answers) {
        answers.push(customer.ask_until_answered().await);
    }
    operator.abort();
    let audit = Audit {
        pool: &rides.pool,
        operation: &rides.operation,
        gateways: &gateways,
        customers: &customers,
        answers,
        left_unfinished,
        decided: &decided,
    };
    let wrong = audit.run(&crew).await?;
    crew.end().await?;
    if wrong.is_empty() {
        println!("\nevery count is right, after {:.1} s", started.elapsed().as_secs_f64());
    }
    Ok(wrong)
}
