//! Proves that every signed event is processed once, however often and in whatever order it is delivered, and that no
//! forged delivery can take a real event's place.
//!
//! The [`receiver`] checks the signature, marks the event and processes it in one transaction. The [`sender`] is in
//! this program too: it forges deliveries, hangs up on one, and then delivers thousands, of which many are repeats and
//! some fail at first.

mod receiver;
mod sender;

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use anyhow::bail;
use demos::books::Books;
use demos::client::{Tally, client, storm};
use demos::gate::Gate;
use demos::schema::{Schema, count};
use demos::service::serve;
use sqlx::PgPool;
use standardwebhooks::Webhook;

use receiver::{Endpoint, Event};
use sender::Sender;

const EVENTS: usize = 3500;
/// Has no common factor with the number of events that are delivered with this step.
const STRIDE: usize = 1009;
/// One event in so many comes twice at once.
const TWICE: usize = 20;
/// One event in so many comes again at the end.
const LATE: usize = 3;
const AT_A_TIME: usize = 16;
/// Few enough that events of one account meet.
const ACCOUNTS: usize = 100;
/// One event in so many fails when it is first processed.
const FAILING: usize = 100;

fn main() -> ExitCode {
    demos::program::run("webhook_receiver", receiver::TABLES, demo)
}

/// An event of the plan. The last one is hung up on.
fn event(number: usize) -> Event {
    let amount = (number * 7919 % 20_000) as i64 - 5_000;
    Event { account: format!("acct_{:02}", number * 31 % ACCOUNTS), amount }
}

fn id(number: usize) -> String {
    format!("evt_{number:06}")
}

/// The sender's secrets, before and after the change.
fn secrets() -> [Webhook; 2] {
    ["whsec_dGhlIG9sZCBzZWNyZXQ=", "whsec_dGhlIG5ldyBzZWNyZXQ="].map(|secret| Webhook::new(secret).expect("base64"))
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let pool = schema.pool(2).await?;
    let failing: HashSet<String> = (0..EVENTS).step_by(FAILING).map(id).collect();
    let failures = failing.len();
    let endpoint = Endpoint {
        pool: schema.pool(12).await?,
        sender: schema.scope("sender"),
        secrets: Arc::new(secrets()),
        failing: Arc::new(Mutex::new(failing)),
    };
    let url = serve(receiver::router(endpoint)).await?;
    let [old, new] = secrets().map(|secret| Sender { url: url.clone(), http: client(), secret });

    books.scene("Forged and stale deliveries, under the id of an event that is still to come");
    books.check("answers", old.forge(&id(0), &event(0)).await, "4 × 401 unsigned");
    books.check("marks", marks(&pool).await?, 0);
    books.check("events", count(&pool, "select count(*) from account_event").await?, 0);

    hang_up(&old, &pool, books).await?;
    books.scene("A recorded delivery, sent again byte for byte");
    let [first, again] = old.replay(&id(1), &event(1)).await;
    books.check("the delivery, and its repeat", format!("{first}, {again}"), "200, 200 replayed");
    books.scene("The sender has changed its secret, and the receiver knows both");
    let answer = new.deliver_once(&id(1), &event(1)).await;
    books.check("the event once more, under the new secret", answer, "200 replayed");
    deliver_all(&new, failures, books).await?;
    audit(&pool, books).await
}

/// The sender gives up waiting, and delivers again while the first delivery is being processed. If that one were called
/// a duplicate, the event would be lost: the sender would be content, and then the first transaction would roll back.
async fn hang_up(sender: &Sender, pool: &PgPool, books: &mut Books) -> anyhow::Result<()> {
    books.scene("A hang-up in the middle, then a redelivery");
    let (id, event) = (&id(EVENTS - 1), event(EVENTS - 1));
    let gate = Gate::shut(pool, "account").await?;
    tokio::select! {
        answer = sender.deliver_once(id, &event) => bail!("answered in front of a shut gate: {answer}"),
        reached = gate.reached() => reached?,
    }
    // The first transaction still holds the mark: its statement goes on, whether or not the receiver has noticed.
    let answer = sender.deliver_once(id, &event).await;
    books.check("the redelivery, while the first is in flight", answer, "503 in-flight");
    gate.open().await?;
    let answers = sender.deliver(id, &event).await;
    let last = answers.last().map(ToString::to_string).unwrap_or_default();
    books.check("the next one, which is the first again", last, "200");
    Ok(())
}

async fn deliver_all(sender: &Sender, failures: usize, books: &mut Books) -> anyhow::Result<()> {
    let others = EVENTS - 1;
    let shuffled = (0..others).map(|place| place * STRIDE % others);
    // The second of two is often there while the first is in flight. A sender that has lost its marks begins again.
    let mut deliveries: Vec<usize> =
        shuffled.flat_map(|number| vec![number; if number.is_multiple_of(TWICE) { 2 } else { 1 }]).collect();
    deliveries.extend((0..others).step_by(LATE));
    let repeats = deliveries.len() - others;

    books.scene(&format!("{others} events out of order, {repeats} repeats, {AT_A_TIME} at a time"));
    let delivering = deliveries.into_iter().map(async |number| sender.deliver(&id(number), &event(number)).await);
    let answers = storm(AT_A_TIME, delivering).await;
    let tally: Tally = answers.into_iter().flatten().collect();
    books.note("answers", &tally);
    // One of them was processed before.
    books.check("processed for the first time", tally.of("200"), others - 1);
    books.check("duplicates", tally.of("200 replayed"), repeats + 1);
    books.check("failed, and delivered again", tally.of("500 failed"), failures);
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
    let off = "
        select count(*)
        from account
        where balance <> (select coalesce(sum(amount), 0)::bigint from account_event where account_id = account.id)
    ";
    books.check("accounts whose balance is not the sum of their events", count(pool, off).await?, 0);
    Ok(())
}
