//! A client of the API, and its view of the database.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use reqwest::StatusCode;
use sqlx::PgPool;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

/// Far above the 5 seconds that the API waits for a request in flight, and the 2 that its slowest work takes here.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// How often to look whether the API is in the middle: a small part of the delay that holds it there.
const GATE_PACE: Duration = Duration::from_millis(5);

#[derive(Clone)]
pub(crate) struct Client {
    /// One pool of connections for all clones, kept alive between requests.
    http: reqwest::Client,
    pub(crate) pool: PgPool,
    run: Uuid,
}

/// A payment that somebody means to make once, however often he asks.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Intent {
    pub(crate) user: String,
    pub(crate) key: String,
    pub(crate) body: String,
}

/// What came back for one request.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) replayed: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) latency: Duration,
}

impl Client {
    pub(crate) fn new(pool: PgPool, run: Uuid) -> anyhow::Result<Self> {
        // A proxy for the outside world has no business between this client and 127.0.0.1.
        let http = reqwest::Client::builder().no_proxy().timeout(ANSWER_LIMIT).build()?;
        Ok(Self { http, pool, run })
    }

    /// All users of this run, and of no other, begin with this.
    pub(crate) fn prefix(&self) -> String {
        format!("demo-{}-", self.run)
    }

    /// Something to pay for, under a key of its own.
    pub(crate) fn intent(&self, user: &str) -> Intent {
        Intent {
            user: format!("{}{user}", self.prefix()),
            key: Uuid::new_v4().to_string(),
            body: r#"{"amount":1250,"currency":"EUR","customer_id":"c-17"}"#.to_owned(),
        }
    }

    /// Asks once.
    pub(crate) async fn ask(&self, url: &str, intent: &Intent) -> reqwest::Result<Answer> {
        let started = Instant::now();
        let request = self
            .http
            .post(format!("{url}/payments"))
            .header("X-User-ID", &intent.user)
            .header("Idempotency-Key", &intent.key)
            .header("Content-Type", "application/json")
            .body(intent.body.clone());
        let response = request.send().await?;
        let status = response.status();
        let replayed = response.headers().get("Idempotency-Replayed").is_some_and(|value| value == "true");
        let body = response.bytes().await?;
        Ok(Answer { status, replayed, body: body.to_vec(), latency: started.elapsed() })
    }

    /// Sends the request and leaves the answer to whoever drops the connection.
    pub(crate) async fn send_only(&self, url: &str, intent: &Intent) -> anyhow::Result<TcpStream> {
        let address = url.strip_prefix("http://").context("no http:// in front")?;
        let mut connection = TcpStream::connect(address).await?;
        let Intent { user, key, body } = intent;
        let request = format!(
            "POST /payments HTTP/1.1\r\nHost: {address}\r\nX-User-ID: {user}\r\nIdempotency-Key: {key}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len(),
        );
        connection.write_all(request.as_bytes()).await?;
        Ok(connection)
    }

    /// Waits until the API is in the middle of `perform`: the key claimed, the payment inserted, nothing committed.
    pub(crate) async fn in_the_middle(&self) -> anyhow::Result<()> {
        let looking = async {
            loop {
                let there: bool = sqlx::query_scalar(
                    "
                    select exists (
                        select
                        from pg_stat_activity
                        where datname = current_database() and wait_event = 'PgSleep'
                    )
                    ",
                )
                .fetch_one(&self.pool)
                .await?;
                if there {
                    return anyhow::Ok(());
                }
                sleep(GATE_PACE).await;
            }
        };
        timeout(ANSWER_LIMIT, looking).await.context("the API never came to the middle of its work")?
    }

    /// How many payments stand under the keys of these.
    pub(crate) async fn payments(&self, intents: &[Intent]) -> sqlx::Result<i64> {
        let mut payments = 0;
        for intent in intents {
            let under_key: i64 = sqlx::query_scalar(
                "select count(*) from payments where user_id = $1::text and idempotency_key = $2::text",
            )
            .bind(&intent.user)
            .bind(&intent.key)
            .fetch_one(&self.pool)
            .await?;
            payments += under_key;
        }
        Ok(payments)
    }
}
