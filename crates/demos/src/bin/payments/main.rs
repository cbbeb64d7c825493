//! Proves that a process which serves payments can be killed, terminated and hung up on at any point of a request, and
//! that the client's retry still finds exactly one payment.
//!
//! ```sh
//! script/demo # on a temporary PostgreSQL
//! cargo run -p demos --bin payments # the same, unless DATABASE_URL names another one
//! ```
//!
//! The [`api`] is the service. Its processes are this program again. This file is the client: it sends duplicates and a
//! changed body, hangs up, and kills the API. At the end it compares the answers with the tables.

mod api;

use std::process::ExitCode;
use std::time::Duration;

use demos::books::Books;
use demos::client::{Answer, Tally, client, storm};
use demos::crew::Worker;
use demos::gate::Gate;
use demos::schema::{Schema, count};
use reqwest::{Client, RequestBuilder};
use sqlx::PgPool;
use tokio::net::TcpStream;
use tokio::time::sleep;
use uuid::Uuid;

const NAME: &str = "payments";
const LIMIT: Duration = Duration::from_secs(120);
const STORM: usize = 2000;
const AT_A_TIME: usize = 200;
const LOOK: Duration = Duration::from_millis(5);

const BODY: &str = r#"{"amount":1250,"currency":"EUR","customer_id":"c-17"}"#;
/// The same values, written differently.
const SAME_BODY: &str = r#"{ "customer_id": "c-17", "currency": "EUR", "amount": 1250 }"#;
const OTHER_BODY: &str = r#"{"amount":9999,"currency":"EUR","customer_id":"c-17"}"#;

fn main() -> ExitCode {
    demos::program::run_worker(NAME, api::serve).unwrap_or_else(|| demos::program::run(NAME, api::TABLES, LIMIT, demo))
}

/// A payment that a user wants to make once, however often the client asks.
#[derive(Clone)]
struct Intent {
    user: String,
    key: String,
    body: &'static str,
}

impl Intent {
    fn request(&self, http: &Client, url: &str) -> RequestBuilder {
        let request = http.post(format!("{url}/payments")).header("Content-Type", "application/json");
        request.header("X-User-ID", &self.user).header("Idempotency-Key", &self.key).body(self.body)
    }
}

struct Script<'a> {
    schema: &'a Schema,
    pool: PgPool,
    http: Client,
    /// The payments that there should be at the end.
    expected: i64,
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let mut script = Script { schema, pool: schema.pool(3).await?, http: client(), expected: 0 };
    let api = script.start().await?;
    script.duplicate_storm(books, &api.url).await?;
    script.another_body(books, &api.url).await?;
    script.refused(books, &api.url).await?;
    script.two_users(books, &api.url).await?;
    script.hang_up(books, &api.url).await?;
    script.killed_in_the_middle(books).await?;
    script.killed_after_the_answer(books, &api.url).await?;
    script.terminated_in_the_middle(books, &api.url).await?;
    script.hang_up_and_terminated(books, &api.url).await?;
    api.terminate().await?;
    api.ended().await?;
    script.audit(books).await
}

impl Script<'_> {
    async fn start(&self) -> anyhow::Result<Worker> {
        Worker::start(self.schema, &[]).await
    }

    /// A payment under a key of its own, which the books will expect once.
    fn intent(&mut self, user: &str) -> Intent {
        self.expected += 1;
        Intent { user: self.schema.scope(user), key: Uuid::new_v4().to_string(), body: BODY }
    }

    async fn ask(&self, url: &str, intent: &Intent) -> Answer {
        Answer::to(intent.request(&self.http, url)).await
    }

    async fn payments(&self, intent: &Intent) -> sqlx::Result<i64> {
        let sql = "select count(*) from payment where user_id = $1::text and idempotency_key = $2::text";
        sqlx::query_scalar(sql).bind(&intent.user).bind(&intent.key).fetch_one(&self.pool).await
    }

    async fn duplicate_storm(&mut self, books: &mut Books, url: &str) -> anyhow::Result<()> {
        books.scene(&format!("{STORM} requests, {AT_A_TIME} at a time, one key"));
        let intent = self.intent("ada");
        let (http, url) = (self.http.clone(), url.to_owned());
        let request = intent.clone();
        let answers = storm(STORM, AT_A_TIME, move |_| Answer::to(request.request(&http, &url))).await?;
        let mut tally = Tally::default();
        answers.iter().for_each(|answer| tally.count(answer));
        books.check("answers", &tally, format!("1 × 201, {} × 201 replayed", STORM - 1));
        books.check("different answers", tally.different(), 1);
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    async fn another_body(&mut self, books: &mut Books, url: &str) -> anyhow::Result<()> {
        books.scene("Another body under a used key");
        let intent = self.intent("ada");
        books.check("12.50 euros", self.ask(url, &intent).await, "201");
        let dearer = Intent { body: OTHER_BODY, ..intent.clone() };
        books.check("99.99 euros, under the same key", self.ask(url, &dearer).await, "422 key-reused");
        let same = Intent { body: SAME_BODY, ..intent.clone() };
        books.check("12.50 euros again, in other white space", self.ask(url, &same).await, "201 replayed");
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    async fn refused(&mut self, books: &mut Books, url: &str) -> anyhow::Result<()> {
        books.scene("Refused requests, and then a right one with their key");
        let intent = self.intent("ada");
        let anonymous = Intent { user: String::new(), ..intent.clone() };
        books.check("without a user", self.ask(url, &anonymous).await, "401 no-user");
        let short = Intent { key: "1".to_owned(), ..intent.clone() };
        books.check("with a key of one character", self.ask(url, &short).await, "400 malformed-key");
        let misspelt = Intent { body: r#"{"ammount":1250,"currency":"EUR","customer_id":"c-17"}"#, ..intent.clone() };
        books.check("with a misspelt member", self.ask(url, &misspelt).await, "400 malformed-body");
        let nothing = Intent { body: r#"{"amount":0,"currency":"EUR","customer_id":"c-17"}"#, ..intent.clone() };
        books.check("without an amount", self.ask(url, &nothing).await, "422 invalid-payment");
        books.check("the right one", self.ask(url, &intent).await, "201");
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    async fn two_users(&mut self, books: &mut Books, url: &str) -> anyhow::Result<()> {
        books.scene("One key, two users");
        let adas = self.intent("ada");
        let bobs = Intent { key: adas.key.clone(), ..self.intent("bob") };
        let mut tally = Tally::default();
        for intent in [&adas, &bobs, &adas, &bobs] {
            tally.count(&self.ask(url, intent).await);
        }
        books.check("answers", &tally, "2 × 201, 2 × 201 replayed");
        books.check("different answers", tally.different(), 2);
        books.check(
            "payments of each",
            format!("{} and {}", self.payments(&adas).await?, self.payments(&bobs).await?),
            "1 and 1",
        );
        Ok(())
    }

    /// Sends a request and drops its connection when the key is claimed and the payment waits at the gate.
    async fn hang_up_on(&self, url: &str, intent: &Intent, gate: &Gate) -> anyhow::Result<()> {
        tokio::select! {
            answer = self.ask(url, intent) => anyhow::bail!("answered in front of a shut gate: {answer}"),
            reached = gate.reached_by(1) => Ok(reached?),
        }
    }

    /// Sends a request, and disturbs the API when the key is claimed and the payment waits at the gate.
    async fn disturb(
        &self,
        url: &str,
        intent: &Intent,
        disturbance: impl Future<Output = anyhow::Result<()>>,
    ) -> anyhow::Result<Answer> {
        let gate = Gate::shut(&self.pool, "payment").await?;
        let disturbed = async {
            gate.reached_by(1).await?;
            disturbance.await?;
            anyhow::Ok(gate.open().await?)
        };
        let (answer, disturbed) = tokio::join!(self.ask(url, intent), disturbed);
        disturbed?;
        Ok(answer)
    }

    /// The run goes on without its client, so the retry finds the response.
    async fn hang_up(&mut self, books: &mut Books, url: &str) -> anyhow::Result<()> {
        books.scene("A hang-up in the middle, then a retry");
        let intent = self.intent("ada");
        let gate = Gate::shut(&self.pool, "payment").await?;
        self.hang_up_on(url, &intent, &gate).await?;
        gate.open().await?;
        books.check("the retry", self.ask(url, &intent).await, "201 replayed");
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    /// PostgreSQL notices that the other end is gone and rolls back. The retry waits for that, and then performs.
    async fn killed_in_the_middle(&mut self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("SIGKILL in the middle, then a retry");
        let (intent, api) = (self.intent("ada"), self.start().await?);
        let url = api.url.clone();
        books.check("the request", self.disturb(&url, &intent, api.kill()).await?, "no answer");
        let restarted = self.start().await?;
        books.check("the retry", self.ask(&restarted.url, &intent).await, "201");
        books.check("payments", self.payments(&intent).await?, 1);
        restarted.kill().await
    }

    async fn killed_after_the_answer(&mut self, books: &mut Books, elsewhere: &str) -> anyhow::Result<()> {
        books.scene("SIGKILL after the answer, then a retry");
        let (intent, api) = (self.intent("ada"), self.start().await?);
        books.check("the request", self.ask(&api.url, &intent).await, "201");
        api.kill().await?;
        books.check("the retry", self.ask(elsewhere, &intent).await, "201 replayed");
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    async fn terminated_in_the_middle(&mut self, books: &mut Books, elsewhere: &str) -> anyhow::Result<()> {
        books.scene("SIGTERM in the middle, then a retry");
        let (intent, api) = (self.intent("ada"), self.start().await?);
        books.check("the request", self.disturb(&api.url, &intent, draining(&api)).await?, "201");
        api.ended().await?;
        books.check("the retry", self.ask(elsewhere, &intent).await, "201 replayed");
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    /// The process has no connection left, and still has to finish the payment.
    async fn hang_up_and_terminated(&mut self, books: &mut Books, elsewhere: &str) -> anyhow::Result<()> {
        books.scene("A hang-up and SIGTERM, then a retry");
        let (intent, api) = (self.intent("ada"), self.start().await?);
        let gate = Gate::shut(&self.pool, "payment").await?;
        self.hang_up_on(&api.url, &intent, &gate).await?;
        draining(&api).await?;
        gate.open().await?;
        api.ended().await?;
        books.check("payments when the process has ended", self.payments(&intent).await?, 1);
        books.check("the retry", self.ask(elsewhere, &intent).await, "201 replayed");
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    /// Both tables as a whole, whatever the scenes have counted.
    async fn audit(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("The books");
        books.check("payments", count(&self.pool, "select count(*) from payment").await?, self.expected);
        let twice = "
            select count(*)
            from (select from payment group by user_id, idempotency_key having count(*) > 1) as twice
        ";
        books.check("users and keys with two payments", count(&self.pool, twice).await?, 0);
        books.check("records", count(&self.pool, "select count(*) from records").await?, self.expected);
        let settled = "
            select count(*)
            from records
            join payment on payment.user_id = records.scope and payment.idempotency_key = records.value
            where completed_at is not null and convert_from(response_body, 'UTF8')::json ->> 'id' = payment.id::text
        ";
        books.check("records whose response names their payment", count(&self.pool, settled).await?, self.expected);
        Ok(())
    }
}

/// Sends SIGTERM, and waits until the API accepts no more connections.
async fn draining(api: &Worker) -> anyhow::Result<()> {
    api.terminate().await?;
    let address = api.url.trim_start_matches("http://");
    while TcpStream::connect(address).await.is_ok() {
        sleep(LOOK).await;
    }
    Ok(())
}
