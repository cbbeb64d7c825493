//! Proves that an operation in steps is finished exactly once although its processes are killed before and after each
//! effect outside the database, its gateway fails, and some of its clients never come back.
//!
//! The service books rides as in Brandur's "Implementing Stripe-like Idempotency Keys in Postgres": each ride is
//! recorded, charged, receipted and announced by text. [`ride`] is the operation, and a [`service`] one process of the
//! service. The customers are in [`customer`], and the [`operator`] settles texts in doubt.

mod customer;
mod operator;
mod ride;
mod service;

use std::process::ExitCode;
use std::time::Duration;

use demos::books::Books;
use demos::client::{Answer, Tally, client, storm};
use demos::crew::Crew;
use demos::gateway::{Gateway, Mishap};
use demos::program::{run, run_service, run_worker};
use demos::schema::{Schema, count};
use sqlx::PgPool;
use tokio::time::sleep;

use customer::Customer;
use operator::Decided;

const NAME: &str = "rides";
const CUSTOMERS: usize = 120;
const AT_A_TIME: usize = 10;
const WORKERS: usize = 3;
const LOOK: Duration = Duration::from_millis(10);

/// Befall so many charges, and so many texts, one after the other.
const ROUNDS: usize = 4;
const MISHAPS: [Mishap; 5] = [
    Mishap::CallerDies { done: true },
    Mishap::NoAnswer { done: true },
    Mishap::Busy,
    Mishap::CallerDies { done: false },
    Mishap::NoAnswer { done: false },
];
/// In each round, two workers die at a charge, and two at a text.
const KILLS: usize = 4 * ROUNDS;
/// Of the charges as of the texts, so many are done without an answer, and as many are not done. A worker that dies may
/// leave others without an answer.
const UNANSWERED: i64 = 2 * ROUNDS as i64;

fn main() -> ExitCode {
    run_service(NAME, ride::TABLES, service::router)
        .or_else(|| run_worker(NAME, service::work))
        .unwrap_or_else(|| run(NAME, ride::TABLES, demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let mut gateway = Gateway::start().await?;
    gateway.fail_next_charges([MISHAPS; ROUNDS].concat());
    gateway.fail_next_texts([MISHAPS; ROUNDS].concat());
    let url = gateway.url.clone();
    let rides = service::rides(schema, &url).await?;
    let mut crew = Crew::start(schema, WORKERS, &[&url]).await?;

    books.scene(&format!("{CUSTOMERS} customers, {AT_A_TIME} at a time"));
    let http = client();
    let customers: Vec<Customer> = (0..CUSTOMERS)
        .map(|number| Customer::new(number, schema.scope("customer"), http.clone(), crew.urls.clone()))
        .collect();
    // In a task of their own: they go on asking while the crew replaces a worker.
    let behaving = tokio::spawn(storm(AT_A_TIME, customers.clone().into_iter().map(Customer::behave)));
    let mut decided = Decided::default();
    let finished = async {
        let answers = behaving.await?;
        // The resumers finish the rides of customers that never come back.
        while count(&rides.pool, "select count(*) from records where completed_at is null").await? > 0 {
            sleep(LOOK).await;
        }
        anyhow::Ok(answers)
    };
    let working = async {
        tokio::select! {
            finished = finished => finished,
            failed = operator::settle(&rides, &mut decided) => match failed? {},
        }
    };
    let mut answers = crew.work(&mut gateway.deaths, working).await?.concat();
    // Now every customer asks once more.
    for customer in &customers {
        answers.push(customer.ask_until_answered().await);
    }
    books.check("SIGKILLs to a worker", crew.killed, KILLS);
    books.check_at_least("repeated charges, which the gateway recognised", gateway.deduplicated(), UNANSWERED);
    books.check_at_least("texts in doubt that were sent", decided.resolved, UNANSWERED);
    books.check_at_least("texts in doubt that were not sent", decided.released, UNANSWERED);
    audit(&rides.pool, &gateway, &customers, answers, books).await
}

/// Counts the customers that have exactly what they should have.
async fn audit(
    pool: &PgPool,
    gateway: &Gateway,
    customers: &[Customer],
    answers: Vec<Answer>,
    books: &mut Books,
) -> anyhow::Result<()> {
    books.scene("The books");
    let booked = "
        select phone
        from ride
        left join receipt on receipt.ride = ride.number
        group by phone
        having count(distinct number) = 1 and count(receipt.charge) = 1
    ";
    let booked: Vec<String> = sqlx::query_scalar(booked).fetch_all(pool).await?;
    let right = customers.iter().filter(|Customer { ride, .. }| {
        booked.contains(&ride.phone) && gateway.charges_of(&ride.card) == 1 && gateway.texts_to(&ride.phone) == 1
    });
    books.check("customers with one ride, charge, receipt and text", right.count(), CUSTOMERS);
    // An answer contains the number of its ride.
    let tally: Tally = answers.into_iter().collect();
    books.check("different answers", tally.different(), CUSTOMERS);
    Ok(())
}
