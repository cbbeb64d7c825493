//! Proves that a process which serves payments can be killed, terminated and hung up on in the middle of a request, and
//! that the client's retry still finds exactly one payment. `script/demo` runs it on a temporary PostgreSQL.
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
use demos::program::{run, run_service, run_worker};
use demos::schema::{Schema, count};
use reqwest::{Client, RequestBuilder};
use sqlx::PgPool;
use tokio::net::TcpStream;
use tokio::time::sleep;
use uuid::Uuid;

const NAME: &str = "payments";
const STORM: usize = 2000;
const AT_A_TIME: usize = 200;
const LOOK: Duration = Duration::from_millis(5);

const BODY: &str = r#"{"amount":1250,"currency":"EUR","customer_id":"c-17"}"#;
/// The same values, written differently.
const SAME_BODY: &str = r#"{ "customer_id": "c-17", "currency": "EUR", "amount": 1250 }"#;
const OTHER_BODY: &str = r#"{"amount":9999,"currency":"EUR","customer_id":"c-17"}"#;
const NO_AMOUNT: &str = r#"{"amount":0,"currency":"EUR","customer_id":"c-17"}"#;

/// What happens to a request in the middle, when its key is claimed and the payment waits at the gate.
struct Disturbance {
    title: &'static str,
    signal: Option<&'static str>,
    /// `None` means that the client hangs up.
    answer: Option<&'static str>,
    retry: &'static str,
}

const DISTURBANCES: [Disturbance; 4] = [
    // The run goes on without its client, so the retry finds the response.
    Disturbance { title: "A hang-up in the middle, then a retry", signal: None, answer: None, retry: "201 replayed" },
    // PostgreSQL notices that the other end is gone and rolls back. The retry waits for that, and then performs.
    Disturbance {
        title: "SIGKILL in the middle, then a retry",
        signal: Some("KILL"),
        answer: Some("no answer"),
        retry: "201",
    },
    Disturbance {
        title: "SIGTERM in the middle, then a retry",
        signal: Some("TERM"),
        answer: Some("201"),
        retry: "201 replayed",
    },
    // The process has no connection left, and still has to finish the payment.
    Disturbance {
        title: "A hang-up and SIGTERM, then a retry",
        signal: Some("TERM"),
        answer: None,
        retry: "201 replayed",
    },
];

fn main() -> ExitCode {
    run_service(NAME, api::TABLES, api::router)
        .or_else(|| run_worker(NAME, api::serve))
        .unwrap_or_else(|| run(NAME, api::TABLES, demo))
}

/// A payment that the user wants to make once, however often the client asks.
#[derive(Clone)]
struct Intent {
    key: String,
    body: &'static str,
}

struct Script<'a> {
    schema: &'a Schema,
    pool: PgPool,
    http: Client,
    user: String,
    /// The payments that there should be at the end.
    expected: i64,
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let (pool, user) = (schema.pool(3).await?, schema.scope("ada"));
    let mut script = Script { schema, pool, http: client(), user, expected: 0 };
    let api = Worker::start(schema, &[]).await?;
    script.duplicate_storm(books, &api.url).await?;
    script.another_body(books, &api.url).await?;
    for disturbance in DISTURBANCES {
        script.disturbed(books, disturbance, &api.url).await?;
    }
    script.audit(books).await
}

impl Script<'_> {
    /// A payment under a key of its own, which the books will expect once.
    fn intent(&mut self) -> Intent {
        self.expected += 1;
        Intent { key: Uuid::new_v4().to_string(), body: BODY }
    }

    fn request(&self, url: &str, intent: &Intent) -> RequestBuilder {
        let request = self.http.post(format!("{url}/payments")).header("Content-Type", "application/json");
        request.header("X-User-ID", &self.user).header("Idempotency-Key", &intent.key).body(intent.body)
    }

    async fn ask(&self, url: &str, intent: &Intent) -> Answer {
        Answer::to(self.request(url, intent)).await
    }

    async fn payments(&self, intent: &Intent) -> sqlx::Result<i64> {
        let sql = "select count(*) from payment where idempotency_key = $1::text";
        sqlx::query_scalar(sql).bind(&intent.key).fetch_one(&self.pool).await
    }

    async fn duplicate_storm(&mut self, books: &mut Books, url: &str) -> anyhow::Result<()> {
        books.scene(&format!("{STORM} requests, {AT_A_TIME} at a time, one key"));
        let intent = self.intent();
        let tally: Tally = storm(AT_A_TIME, (0..STORM).map(|_| self.ask(url, &intent))).await.into_iter().collect();
        books.check("answers", &tally, format!("1 × 201, {} × 201 replayed", STORM - 1));
        books.check("different answers", tally.different(), 1);
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    async fn another_body(&mut self, books: &mut Books, url: &str) -> anyhow::Result<()> {
        books.scene("Other bodies under one key");
        let intent = self.intent();
        let with = |body| Intent { body, ..intent.clone() };
        books.check("without an amount", self.ask(url, &with(NO_AMOUNT)).await, "422 invalid-payment");
        books.check("12.50 euros, because the key is still free", self.ask(url, &intent).await, "201");
        books.check("99.99 euros", self.ask(url, &with(OTHER_BODY)).await, "422 key-reused");
        books.check("12.50 euros again, in other white space", self.ask(url, &with(SAME_BODY)).await, "201 replayed");
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    /// The request goes to a process of its own, and the retry elsewhere.
    async fn disturbed(&mut self, books: &mut Books, scene: Disturbance, elsewhere: &str) -> anyhow::Result<()> {
        books.scene(scene.title);
        let (intent, mut api) = (self.intent(), Worker::start(self.schema, &[]).await?);
        let gate = Gate::shut(&self.pool, "payment").await?;
        let request = tokio::spawn(Answer::to(self.request(&api.url, &intent)));
        gate.reached().await?;
        if scene.answer.is_none() {
            request.abort();
        }
        if let Some(signal) = scene.signal {
            api.signal(signal).await?;
            while TcpStream::connect(api.url.trim_start_matches("http://")).await.is_ok() {
                sleep(LOOK).await;
            }
        }
        gate.open().await?;
        if scene.signal == Some("TERM") {
            api.ended().await?;
        }
        if let Some(answer) = scene.answer {
            books.check("the request", request.await?, answer);
        }
        books.check("the retry", self.ask(elsewhere, &intent).await, scene.retry);
        books.check("payments", self.payments(&intent).await?, 1);
        Ok(())
    }

    /// Both tables as a whole, whatever the scenes have counted.
    async fn audit(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("The books");
        books.check("payments", count(&self.pool, "select count(*) from payment").await?, self.expected);
        books.check("records", count(&self.pool, "select count(*) from records").await?, self.expected);
        let settled = "
            select count(*)
            from records
            join payment on payment.user_id = records.scope and payment.idempotency_key = records.value
            where completed_at is not null and convert_from(response_body, 'UTF8')::json ->> 'id'::text = payment.id::text
        ";
        books.check("records whose response names their payment", count(&self.pool, settled).await?, self.expected);
        Ok(())
    }
}
