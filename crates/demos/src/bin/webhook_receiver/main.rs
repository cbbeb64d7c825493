//! Proves that every signed event is processed once, however often and in whatever order it is delivered, and that no
//! forged delivery can take a real event's place.
//!
//! ```sh
//! cargo run -p demos --bin webhook_receiver # on a temporary PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! The [`receiver`] checks the signature, marks the event and processes it in one transaction. The [`sender`] is in this
//! program too: it forges deliveries, hangs up on one, and then delivers thousands, of which a third are repeats and
//! some fail at first.

mod receiver;
mod sender;

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::bail;
use demos::books::Books;
use demos::client::{Answer, Tally, client, storm};
use demos::dice;
use demos::gate::Gate;
use demos::schema::{Schema, count};
use demos::server::Server;
use demos::signature::Secret;
use sqlx::PgPool;

use receiver::{Endpoint, Event};
use sender::Sender;

/// It takes five seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(100);
const EVENTS: usize = 3500;
/// A tenth of these come right after their event, when that is probably in flight.
const REPEATS: usize = 1500;
const AT_A_TIME: usize = 8;
/// Few enough that events of one account meet.
const ACCOUNTS: usize = 100;
/// One event in so many fails when it is first processed.
const FAILING: usize = 100;

fn main() -> ExitCode {
    demos::program::run("webhook_receiver", receiver::TABLES, LIMIT, demo)
}

/// An event of the plan. The last one is hung up on.
fn event(number: usize) -> Event {
    let amount = (number * 7919 % 20_000) as i64 - 5_000;
    Event { id: format!("evt_{number:06}"), account: format!("acct_{:02}", number * 31 % ACCOUNTS), amount }
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let pool = schema.pool(2).await?;
    let secret = Secret::new(b"whsec_of_this_sender");
    let failing: HashSet<String> = (0..EVENTS).step_by(FAILING).map(|number| event(number).id).collect();
    let failures = failing.len();
    let endpoint = Endpoint {
        pool: schema.pool(12).await?,
        sender: schema.scope("sender"),
        secret: secret.clone(),
        failing: Arc::new(Mutex::new(failing)),
    };
    let server = Server::start(receiver::router(endpoint)).await?;
    let sender = Sender { url: server.url.clone(), http: client(), secret };

    books.scene("Forged and stale deliveries, under the id of an event that is still to come");
    books.check("answers", sender.forge(&event(0)).await, "6 × 401 forged, 2 × 401 stale");
    books.check("marks", marks(&pool).await?, 0);
    books.check("events", count(&pool, "select count(*) from account_event").await?, 0);

    hang_up(&sender, &pool, books).await?;
    deliver_all(&sender, failures, books).await?;
    audit(&pool, books).await?;
    drop(sender);
    server.stop().await
}

/// The sender gives up waiting, and delivers again while the first delivery is being processed. If that one were called a
/// duplicate, the event would be lost: the sender would be content, and then the first transaction would roll back.
async fn hang_up(sender: &Sender, pool: &PgPool, books: &mut Books) -> anyhow::Result<()> {
    books.scene("A hang-up in the middle, then a redelivery");
    let event = event(EVENTS - 1);
    let gate = Gate::shut(pool, "account").await?;
    tokio::select! {
        answer = sender.deliver_once(&event) => bail!("answered in front of a shut gate: {answer}"),
        reached = gate.reached_by(1) => reached?,
    }
    // The first transaction still holds the mark: its statement goes on, whether or not the receiver has noticed.
    let answer = sender.deliver_once(&event).await;
    books.check("the redelivery, while the first is in flight", answer, "503 in-flight");
    gate.open().await?;
    let answers = sender.deliver(&event).await;
    let last = answers.last().map(ToString::to_string).unwrap_or_default();
    books.check("the next one, which is the first again", last, "200");
    Ok(())
}

async fn deliver_all(sender: &Sender, failures: usize, books: &mut Books) -> anyhow::Result<()> {
    books.scene(&format!("{EVENTS} events, {REPEATS} repeats, {AT_A_TIME} at a time, in random order"));
    let mut groups: Vec<Vec<usize>> =
        (0..EVENTS - 1).map(|number| vec![number; if number < REPEATS / 10 { 2 } else { 1 }]).collect();
    groups.extend((REPEATS / 10..REPEATS).map(|_| vec![dice::below(EVENTS - 1)]));
    for at in (1..groups.len()).rev() {
        groups.swap(at, dice::below(at + 1));
    }
    let order = groups.concat();

    let (deliveries, sender) = (order.len(), sender.clone());
    let deliver = move |at: usize| {
        let (sender, event) = (sender.clone(), event(order[at]));
        async move { sender.deliver(&event).await }
    };
    let answers: Vec<Vec<Answer>> = storm(deliveries, AT_A_TIME, deliver).await?;
    let mut tally = Tally::default();
    answers.iter().flatten().for_each(|answer| tally.count(answer));
    books.note("answers", &tally);
    books.check("processed for the first time", tally.of("200"), EVENTS - 1);
    books.check("duplicates", tally.of("200 replayed"), REPEATS);
    books.check("failed, and delivered again", tally.of("500 failed"), failures);
    let others = answers.iter().flatten().count() - tally.of("503 in-flight") - tally.of("503 unavailable");
    books.check("other answers", others - deliveries - failures, 0);
    Ok(())
}

async fn marks(pool: &PgPool) -> sqlx::Result<i64> {
    count(pool, "select count(*) from records where mode = 'mark'").await
}

async fn audit(pool: &PgPool, books: &mut Books) -> anyhow::Result<()> {
    books.scene("The books");
    books.check("marks", marks(pool).await?, EVENTS);
    books.check("events", count(pool, "select count(*) from account_event").await?, EVENTS);
    let different = "select count(distinct event_id) from account_event";
    books.check("different events", count(pool, different).await?, EVENTS);
    let total: i64 = (0..EVENTS).map(|number| event(number).amount).sum();
    books.check("the sum of all balances", count(pool, "select sum(balance)::int8 from account").await?, total);
    let off = "
        select count(*)
        from account
        where balance <> (select coalesce(sum(amount), 0) from account_event where account_id = account.id)
    ";
    books.check("accounts whose balance is not the sum of their events", count(pool, off).await?, 0);
    Ok(())
}
