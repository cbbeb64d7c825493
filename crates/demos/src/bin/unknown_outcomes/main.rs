//! Proves that operations whose outcome nobody knows end by themselves: each text is sent once, although each process
//! that sends texts is killed between its requests and their answers, and although the provider takes no idempotency
//! key.
//!
//! The [`sender`] uses the crate, and runs a reconciler. The [`provider`] is a process of its own, which sends a third
//! of the texts at once, a third late, and loses a third. The name of an event is the customer's phone.

mod provider;
mod sender;

use std::process::ExitCode;
use std::time::Duration;

use demos::books::Books;
use demos::broker::{Broker, Event, MISSING, Server};
use demos::crew::{Crew, Worker};
use demos::program::{run, run_worker};
use demos::schema::Schema;
use pg_idempotency::operator::unsettled;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::sleep;

use provider::{Outcome, Provider};

const NAME: &str = "unknown_outcomes";
const TEXTS: usize = 200;
/// A third of the texts, less those that a slow machine delivers to the provider after their lease.
const LEAST: i64 = 50;

fn main() -> ExitCode {
    let work = async |schema: &Schema, arguments: &[String]| match arguments {
        [] => provider::serve().await,
        [provider, broker] => sender::work(schema, provider, broker).await,
        _ => anyhow::bail!("a worker is the provider, or gets the URLs of the provider and of the broker"),
    };
    run_worker(NAME, work).unwrap_or_else(|| run(NAME, "", demo))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let Some(server) = Server::start()? else {
        return books.skip(MISSING);
    };
    let (pool, broker) = (schema.pool(3).await?, Broker::connect(server.url()).await?);
    books.scene(&format!("{TEXTS} texts, whose senders die before the provider answers"));
    for number in 0..TEXTS {
        broker.send(sender::KIND, &phone(number)).await?;
    }
    let process = Worker::start(schema, &[]).await?;
    let provider = Provider::new(&process.url);
    let (dying, mut deaths) = unbounded_channel();
    let asking = provider.clone();
    tokio::spawn(async move {
        while let Ok(senders) = asking.deaths().await {
            senders.into_iter().for_each(|sender| dying.send(sender).unwrap_or_default());
            sleep(Duration::from_millis(50)).await;
        }
    });
    let mut crew = Crew::start(schema, 3, &[&process.url, server.url()]).await?;
    crew.work(&mut deaths, broker.handled(&[sender::KIND])).await?;
    books.check_at_least("SIGKILLs to a sender", i64::try_from(crew.killed)?, 10);

    books.scene("The books of the provider");
    let texts = provider.books().await?;
    let first = |outcome| texts.iter().filter(|text| text.first == outcome).count();
    let requests: usize = texts.iter().map(|text| text.requests).sum();
    println!("   {:<24} {:>6} {:>10} {:>10}", "the first request", "texts", "requests", "effects");
    for outcome in [Outcome::TookEffect, Outcome::TookEffectLate, Outcome::Lost] {
        let of: Vec<_> = texts.iter().filter(|text| text.first == outcome).collect();
        let (requests, effects): (usize, usize) =
            (of.iter().map(|text| text.requests).sum(), of.iter().map(|text| text.receipts.len()).sum());
        println!("   {:<24} {:>6} {requests:>10} {effects:>10}", outcome.in_words(), of.len());
    }
    books.check_at_least("texts that were sent at once", i64::try_from(first(Outcome::TookEffect))?, LEAST);
    books.check_at_least("texts that were sent late", i64::try_from(first(Outcome::TookEffectLate))?, LEAST);
    books.check_at_least("texts that were lost", i64::try_from(first(Outcome::Lost))?, LEAST);
    books.check("customers with one text", texts.iter().filter(|text| text.receipts.len() == 1).count(), TEXTS);
    books.check("texts", texts.iter().map(|text| text.receipts.len()).sum::<usize>(), TEXTS);
    books.check(
        "requests: one for each text, and a second one for each lost text",
        requests,
        TEXTS + first(Outcome::Lost),
    );
    let waiting = unsettled(&pool, 1000, None, None).await?;
    let waiting = waiting.iter().filter(|shown| shown.key.scope() == schema.scope("shop")).count();
    books.check("texts that wait for a person", waiting, 0);

    books.scene("Each text is requested once more, as by a broker that has lost its acknowledgements");
    let mut receipts = 0;
    for event in (0..TEXTS).map(phone) {
        let sent = sender::send(schema, &pool, &provider, &event).await?;
        let receipt = texts.iter().find(|text| text.phone == event.id).and_then(|text| text.receipts.first());
        receipts += usize::from(sent.is_replayed() && Some(&sent.into_inner()) == receipt);
    }
    books.check("replayed, with the receipt of the provider", receipts, TEXTS);
    Ok(())
}

fn phone(number: usize) -> Event {
    Event { id: format!("phone {number}") }
}
