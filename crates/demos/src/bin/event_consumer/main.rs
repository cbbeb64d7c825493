//! Proves that every event of a broker is handled exactly once or set aside, while its workers and the broker itself
//! are killed in the middle of their work.
//!
//! The [`worker`] uses the crate, with one handler for each kind of event: a batch of page views, which a mark guards;
//! an order, whose effect and answer are in the database; a text through a gateway that does not recognise repeats,
//! under a lease. The gateway gives some requests no answer until their worker is killed, and answers others with an
//! error after the effect.

mod worker;

use std::process::ExitCode;
use std::time::Duration;

use demos::books::Books;
use demos::broker::{Broker, Event, MISSING, Server};
use demos::crew::Crew;
use demos::gateway::{Gateway, Mishap, REFUSED};
use demos::schema::{Schema, count};
use sqlx::PgPool;
use tokio::time::sleep;

use worker::{INVALID, ORDERS, SLOW, TEXTS, VIEWS};

const NAME: &str = "event_consumer";
const WORKERS: usize = 4;
/// Of each kind.
const EVENTS: usize = 240;
/// One event in so many is sent twice.
const TWICE: usize = 6;
/// Of each kind.
const POISON: usize = 6;
/// So many orders take longer than the broker waits for an acknowledgement.
const SLOW_ORDERS: usize = 8;
const KILLS: usize = 12;
/// The worst case of a failure: it comes after the effect.
const FAILURES: usize = 12;
/// The broker is killed when so many orders are stored.
const BROKER_DIES: [i64; 2] = [60, 140];

fn main() -> ExitCode {
    demos::program::run_worker(NAME, worker::work).unwrap_or_else(|| demos::program::run(NAME, worker::TABLES, demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let Some(mut server) = Server::start()? else {
        return books.skip(MISSING);
    };
    let pool = schema.pool(2).await?;
    let broker = Broker::connect(server.url()).await?;
    let mut gateway = Gateway::start().await?;
    gateway.fail_next_texts([Mishap::CallerDies { done: true }; KILLS]);
    gateway.fail_next_texts([Mishap::NoAnswer { done: true }; FAILURES]);
    books.scene(&format!(
        "{EVENTS} events of each of three kinds, some of them sent twice, {POISON} that always fail, {WORKERS} workers"
    ));
    for number in 0..EVENTS {
        for kind in [VIEWS, ORDERS, TEXTS] {
            let event = Event { id: id(kind, number) };
            broker.send(kind, &event).await?;
            if number.is_multiple_of(TWICE) {
                // Directly behind the first message, which is often in flight then.
                broker.send(kind, &event).await?;
            }
        }
    }
    for number in 0..POISON {
        for (kind, poison) in [(VIEWS, INVALID), (ORDERS, INVALID), (TEXTS, REFUSED)] {
            broker.send(kind, &Event { id: format!("{poison} {number}") }).await?;
        }
    }
    let arguments = [server.url().to_owned(), gateway.url.clone()];
    let arguments = arguments.each_ref().map(String::as_str);
    let mut crew = Crew::start(schema, WORKERS, &arguments).await?;
    let work = async {
        for orders in BROKER_DIES {
            while stored(&pool).await? < orders {
                sleep(Duration::from_millis(20)).await;
            }
            server.kill()?;
        }
        broker.handled(&[VIEWS, ORDERS, TEXTS]).await
    };
    crew.work(&mut gateway.deaths, work).await?;
    books.check("SIGKILLs to a worker, after its effect and before its result", crew.killed, KILLS);
    books.note("SIGKILLs to the broker", BROKER_DIES.len());
    books.check("events set aside, each once", broker.set_aside().await?, 3 * POISON);
    let met = "select count(distinct event) from met where number > 1";
    books.check_at_least("redeliveries that met the first delivery at work", count(&pool, met).await?, 1);
    audit(&pool, &gateway, books).await
}

async fn stored(pool: &PgPool) -> sqlx::Result<i64> {
    count(pool, "select count(*) from placed_order").await
}

async fn audit(pool: &PgPool, gateway: &Gateway, books: &mut Books) -> anyhow::Result<()> {
    books.scene("The books of the page views, which a mark guards");
    books.check("views", count(pool, "select count(*) from page_view").await?, EVENTS);
    books.check("different views", count(pool, "select count(distinct event) from page_view").await?, EVENTS);
    let marks = "select count(*) from records where mode = 'mark'";
    books.check("marks", count(pool, marks).await?, EVENTS);

    books.scene("The books of the orders, in the database");
    books.check("orders", stored(pool).await?, EVENTS);
    books.check("different orders", count(pool, "select count(distinct event) from placed_order").await?, EVENTS);
    let answers = "select count(*) from records where mode = 'transaction' and response_body is not null";
    books.check("stored answers", count(pool, answers).await?, EVENTS);

    books.scene("The books of the gateway, which sends a text again if its worker died after the effect");
    let effects: Vec<usize> = (0..EVENTS).map(|number| gateway.texts_to(&id(TEXTS, number))).collect();
    books.check("completed events without an effect", effects.iter().filter(|effects| **effects == 0).count(), 0);
    let total: usize = effects.iter().sum();
    books.note("effects", total);
    books.check_at_least("effects that were repeated", (total - EVENTS) as i64, (KILLS + FAILURES) as i64);
    let attempts = "select sum(attempt) from records where mode = 'at_least_once' and completed_at is not null";
    books.check("effects without an attempt", (total as i64 - count(pool, attempts).await?).max(0), 0);
    let results = "select count(*) from records where mode = 'at_least_once' and response_body is not null";
    books.check("stored results", count(pool, results).await?, EVENTS);
    let exhausted = "select count(*) from records where completed_at is null and attempt = 8";
    books.check("events that have used up their attempts", count(pool, exhausted).await?, POISON);
    Ok(())
}

fn id(kind: &str, number: usize) -> String {
    let slow = if kind == ORDERS && number < SLOW_ORDERS { SLOW } else { "" };
    format!("{kind} {number}{slow}")
}
