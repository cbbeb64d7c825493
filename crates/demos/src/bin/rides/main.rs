//! Proves that an operation in steps is finished exactly once although its processes are killed at random moments, its
//! gateways fail, and some of its clients never come back.
//!
//! ```sh
//! cargo run -p demos --bin rides # on a temporary PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! The service books rides as in Brandur's "Implementing Stripe-like Idempotency Keys in Postgres": each ride is
//! recorded, charged, receipted and announced by text. [`ride`] is the operation, and a [`service`] one process of the
//! service. The customers are in [`customer`], and the [`operator`] settles texts in doubt.

mod customer;
mod operator;
mod ride;
mod service;

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::ensure;
use demos::books::Books;
use demos::client::{Answer, client, storm};
use demos::crew::Crew;
use demos::dice;
use demos::gateway::{Gateway, Mishap};
use demos::schema::{Schema, count};
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use customer::Customer;
use operator::Decided;

const NAME: &str = "rides";
const CUSTOMERS: usize = 120;
const AT_A_TIME: usize = 10;
const WORKERS: usize = 3;
const FAILS_ONE_IN: usize = 15;
const KILLS: usize = 30;
/// Kills keep the pace of the work, so a slow machine has no more of them for each ride than a fast one.
const REQUESTS_BETWEEN_KILLS: usize = 7;
const LONGEST_DELAY: Duration = Duration::from_millis(80);
/// With fewer rides that needed several attempts, a run proves little.
const FEWEST_TAKEN_OVER: i64 = 10;
/// It takes half a minute on an idle machine.
const LIMIT: Duration = Duration::from_secs(300);
/// After the storm, back-off and leases delay a ride for seconds.
const DRAIN_LIMIT: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(10);

fn main() -> ExitCode {
    demos::program::run_worker(NAME, service::work)
        .unwrap_or_else(|| demos::program::run(NAME, ride::TABLES, LIMIT, demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let gateway = Gateway::start(Some(FAILS_ONE_IN)).await?;
    // Chance alone leaves some runs without a text in doubt of each kind.
    gateway.fail_next_texts([true, false].map(|done| Mishap::NoAnswer { done }));
    let url = gateway.server.url.clone();
    let rides = service::rides(schema, &url).await?;
    let mut crew = Crew::start(schema, WORKERS, &[&url]).await?;
    let decided = Arc::new(Decided::default());
    let operator = tokio::spawn({
        let (rides, decided) = (rides.clone(), decided.clone());
        async move { operator::settle(&rides, &decided).await }
    });

    books.scene(&format!("{CUSTOMERS} customers, {AT_A_TIME} at a time"));
    let http = client();
    let customers: Vec<Customer> = (0..CUSTOMERS)
        .map(|number| Customer::new(number, schema.scope("customer"), http.clone(), crew.urls.clone()))
        .collect();
    let behaving = customers.clone();
    let all = tokio::spawn(storm(CUSTOMERS, AT_A_TIME, move |number| behaving[number].clone().behave()));
    disturb(&mut crew, &gateway, || all.is_finished() || operator.is_finished()).await?;
    let mut answers = all.await??;
    drain(&rides.pool, &mut crew, &operator).await?;
    books.check("rides that nobody has finished", unfinished(&rides.pool).await?, 0);
    // The customers that never came back ask too.
    for (customer, answers) in customers.iter().zip(&mut answers) {
        answers.push(customer.ask_until_answered().await);
    }
    operator.abort();
    books.note("customers that never came back", customers.iter().filter(|customer| !customer.comes_back()).count());
    books.check_at_least("SIGKILLs to a worker", crew.killed as i64, 1);
    crew.end().await?;
    books.note("attempts", count(&rides.pool, "select sum(attempt) from records").await?);
    let taken_over = count(&rides.pool, "select count(*) from records where attempt > 1").await?;
    books.check_at_least("rides that took more than one attempt", taken_over, FEWEST_TAKEN_OVER);
    books.note("charges that the gateway recognised by their key", gateway.deduplicated());
    books.check_at_least("texts in doubt that were sent", decided.resolved.load(Ordering::Relaxed), 1);
    books.check_at_least("texts in doubt that were not sent", decided.released.load(Ordering::Relaxed), 1);
    audit(&rides.pool, &gateway, &customers, &answers, books).await
}

/// Kills workers at random moments, until `finished` says that there is no more work.
async fn disturb(crew: &mut Crew<'_>, gateway: &Gateway, finished: impl Fn() -> bool) -> anyhow::Result<()> {
    for kill in 1..=KILLS {
        while gateway.requests() < kill * REQUESTS_BETWEEN_KILLS {
            if finished() {
                return Ok(());
            }
            crew.must_be_alive()?;
            sleep(LOOK).await;
        }
        sleep(dice::duration(Duration::ZERO, LONGEST_DELAY)).await;
        crew.kill_any().await?;
    }
    Ok(())
}

/// Waits until the resumers and the operator have finished the rides of customers that never came back.
async fn drain(pool: &PgPool, crew: &mut Crew<'_>, operator: &JoinHandle<anyhow::Result<()>>) -> anyhow::Result<()> {
    let drained = Instant::now() + DRAIN_LIMIT;
    while unfinished(pool).await? > 0 && Instant::now() < drained {
        crew.must_be_alive()?;
        ensure!(!operator.is_finished(), "the operator has given up");
        sleep(LOOK).await;
    }
    Ok(())
}

async fn unfinished(pool: &PgPool) -> sqlx::Result<i64> {
    count(pool, "select count(*) from records where completed_at is null").await
}

/// Counts the customers that did not get exactly what they should have.
async fn audit(
    pool: &PgPool,
    gateway: &Gateway,
    customers: &[Customer],
    answers: &[Vec<Answer>],
    books: &mut Books,
) -> anyhow::Result<()> {
    books.scene("The books");
    let rows: Vec<(String, i64, i64)> = sqlx::query_as(
        "
        select phone, count(distinct number), count(receipt.charge)
        from ride
        left join receipt on receipt.ride = ride.number
        group by phone
        ",
    )
    .fetch_all(pool)
    .await?;
    let rows: HashMap<String, (i64, i64)> =
        rows.into_iter().map(|(phone, rides, receipts)| (phone, (rides, receipts))).collect();
    let rows = |customer: &Customer| rows.get(&customer.ride.phone).copied().unwrap_or_default();
    let charges = |customer: &Customer| gateway.charges_of(&customer.ride.card);
    let texts = |customer: &Customer| gateway.texts_to(&customer.ride.phone);

    let all =
        customers.iter().filter(|customer| (rows(customer), charges(customer), texts(customer)) == ((1, 1), 1, 1));
    books.check("customers with one ride, charge, receipt and text", all.count(), CUSTOMERS);
    let differing = answers.iter().filter(|answers| answers.iter().any(|answer| answer.text != answers[0].text));
    books.check("customers that got different answers", differing.count(), 0);
    Ok(())
}
