//! The contract of `payments_api`, against its real process on a real socket. `script/demo` covers storms, hang-ups and
//! kills.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use pg_idempotency::{Key, ensure_idempotent};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, PgPool};

/// Killed with this value.
struct Api {
    process: Child,
    base: String,
    client: Client,
}

impl Api {
    fn start(options: &PgConnectOptions) -> anyhow::Result<Self> {
        let mut process = Command::new(env!("CARGO_BIN_EXE_payments_api"))
            .env("DATABASE_URL", options.to_url_lossy().to_string())
            .env("LISTEN_ADDR", "127.0.0.1:0")
            .env("PAYMENTS_EXIT_WITH_PARENT", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line)?;
        let base = line.trim().strip_prefix("listening on ").expect("its address").to_owned();
        Ok(Self { process, base, client: Client::new() })
    }

    fn post(&self) -> RequestBuilder {
        self.client.post(format!("{}/payments", self.base))
    }

    async fn pay(&self, user: &str, key: &str, body: &Value) -> anyhow::Result<Response> {
        Ok(self.post().header("X-User-ID", user).header("Idempotency-Key", key).json(body).send().await?)
    }

    async fn payments_of(&self, user: &str) -> anyhow::Result<Vec<Value>> {
        let list = self.client.get(format!("{}/payments", self.base)).header("X-User-ID", user).send().await?;
        assert_eq!(list.status(), StatusCode::OK);
        let list: Value = list.json().await?;
        Ok(list["payments"].as_array().expect("an array").clone())
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn payment() -> Value {
    json!({"amount": 1250, "currency": "EUR", "customer_id": "c-17"})
}

/// The answer is a problem of this status and type, with all that RFC 9457 asks for.
async fn assert_problem(response: Response, status: u16, kind: &str) -> anyhow::Result<()> {
    let content_type = response.headers()["content-type"].to_str()?.to_owned();
    assert_eq!(response.status().as_u16(), status, "{}", response.text().await?);
    assert_eq!(content_type, "application/problem+json");
    let problem: Value = response.json().await?;
    assert_eq!(problem["status"], status);
    assert_eq!(problem["type"], format!("https://payments.example/problems/{kind}"));
    for member in ["title", "detail"] {
        assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
    }
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn a_payment_is_made_once_and_replayed_byte_for_byte(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let api = Api::start(&options)?;
    let first = api.pay("ada", "order-4711-payment", &payment()).await?;
    assert_eq!(first.status(), StatusCode::CREATED);
    assert!(!first.headers().contains_key("idempotency-replayed"));
    let first = first.bytes().await?;
    let made: Value = serde_json::from_slice(&first)?;
    uuid::Uuid::parse_str(made["id"].as_str().expect("an id"))?;
    assert_eq!(made["status"], "confirmed");
    assert_eq!(
        (&made["amount"], &made["currency"], &made["customer_id"]),
        (&json!(1250), &json!("EUR"), &json!("c-17"))
    );
    // The same key bare and as the structured-field string of the IETF draft.
    for key in ["order-4711-payment", "\"order-4711-payment\""] {
        let again = api.pay("ada", key, &payment()).await?;
        assert_eq!(again.status(), StatusCode::CREATED);
        assert_eq!(again.headers()["idempotency-replayed"], "true");
        assert_eq!(again.bytes().await?, first);
    }
    assert_eq!(api.payments_of("ada").await?, [made]);
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn two_users_with_one_key_do_not_see_each_other(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let api = Api::start(&options)?;
    let mut ids = Vec::new();
    for user in ["ada", "bob"] {
        let response = api.pay(user, "the-same-key", &payment()).await?;
        assert_eq!(response.status(), StatusCode::CREATED);
        assert!(!response.headers().contains_key("idempotency-replayed"));
        let made: Value = response.json().await?;
        assert_eq!(api.payments_of(user).await?, std::slice::from_ref(&made));
        ids.push(made["id"].clone());
    }
    assert_ne!(ids[0], ids[1]);
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn what_is_wrong_is_refused_and_nothing_is_stored(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let api = Api::start(&options)?;
    let pool = PgPool::connect_with(options).await?;

    let keyless = api.post().header("X-User-ID", "ada").json(&payment()).send().await?;
    assert_problem(keyless, 400, "malformed-key").await?;
    for key in ["", "short12", "\"short12\"", "\"unclosed-quote", "x".repeat(256).as_str()] {
        assert_problem(api.pay("ada", key, &payment()).await?, 400, "malformed-key").await?;
    }
    let anonymous = api.post().header("Idempotency-Key", "a-good-key").json(&payment()).send().await?;
    assert_problem(anonymous, 401, "no-user").await?;
    assert_problem(api.pay("", "a-good-key", &payment()).await?, 401, "no-user").await?;

    for (body, status) in [
        ("", 400),
        ("{", 400),
        ("[]", 400),
        ("{}", 400),
        (r#"{"amount": "1250", "currency": "EUR", "customer_id": "c"}"#, 400),
        (r#"{"amount": 1250, "currency": "EUR", "customer_id": "c", "ammount": 1}"#, 400),
        (r#"{"amount": 0, "currency": "EUR", "customer_id": "c"}"#, 422),
        (r#"{"amount": -5, "currency": "EUR", "customer_id": "c"}"#, 422),
        (r#"{"amount": 1, "currency": "EURO", "customer_id": "c"}"#, 422),
        (r#"{"amount": 1, "currency": "EUR", "customer_id": ""}"#, 422),
        (r#"{"amount": 1, "currency": "EUR", "customer_id": "\u0000"}"#, 422),
    ] {
        let response = api
            .post()
            .header("X-User-ID", "ada")
            .header("Idempotency-Key", "a-good-key")
            .header("Content-Type", "application/json")
            .body(body)
            .send()
            .await?;
        let kind = if status == 400 { "malformed-body" } else { "invalid-payment" };
        assert_problem(response, status, kind).await?;
    }
    let large = json!({"amount": 1, "currency": "EUR", "customer_id": "x".repeat(1024 * 1024)});
    assert_problem(api.pay("ada", "a-good-key", &large).await?, 413, "too-large").await?;

    let (records, payments): (i64, i64) =
        sqlx::query_as("select (select count(*) from idempotency.record), (select count(*) from payments)")
            .fetch_one(&pool)
            .await?;
    assert_eq!((records, payments), (0, 0));

    assert_eq!(api.pay("ada", "a-good-key", &payment()).await?.status(), StatusCode::CREATED, "the key is still free");
    let other = json!({"amount": 1, "currency": "EUR", "customer_id": "c-17"});
    assert_problem(api.pay("ada", "a-good-key", &other).await?, 422, "key-reused").await?;
    assert_problem(api.client.get(format!("{}/nowhere", api.base)).send().await?, 404, "unknown-route").await?;
    assert_problem(api.client.delete(format!("{}/payments", api.base)).send().await?, 405, "wrong-method").await?;
    assert_eq!(api.client.get(format!("{}/healthz", api.base)).send().await?.status(), StatusCode::OK);
    Ok(())
}

/// The owner is a transaction of this test's, so that it is in flight for certain.
#[sqlx::test(migrations = false)]
async fn a_duplicate_waits_five_seconds_and_is_told_to_retry(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let api = Api::start(&options)?;
    let pool = PgPool::connect_with(options).await?;
    let key = Key::new("ada", "POST /payments", "a-good-key")?;
    let mut owner = pool.begin().await?;
    let owned = ensure_idempotent(&mut owner, &key, "another payment", async |_| anyhow::Ok(())).await?;
    assert!(!owned.is_replayed(), "the key is new");
    let asked = std::time::Instant::now();
    let response = api.pay("ada", "a-good-key", &payment()).await?;
    let waited = asked.elapsed().as_secs_f64();
    assert!((5.0..8.0).contains(&waited), "{waited} s");
    assert!(response.headers().contains_key("retry-after"));
    assert_problem(response, 409, "in-flight").await
}

#[sqlx::test(migrations = false)]
async fn sigterm_ends_it_with_success(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let mut api = Api::start(&options)?;
    assert_eq!(api.pay("ada", "a-good-key", &payment()).await?.status(), StatusCode::CREATED);
    let sent = Command::new("kill").args(["-TERM", &api.process.id().to_string()]).status()?;
    assert!(sent.success());
    // `wait` would close it, and the API ends without a word when its parent seems gone.
    let _stdin = api.process.stdin.take();
    let status = tokio::task::spawn_blocking(move || api.process.wait()).await??;
    assert_eq!(status.code(), Some(0));
    Ok(())
}
