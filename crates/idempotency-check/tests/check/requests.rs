//! Bodies that are no JSON, and a key that is in no header. The service accepts nothing else, and has to see the same
//! request again after its COMMIT was executed and its connection was lost.

use std::process::Stdio;

use anyhow::Context as _;
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse as _;
use sqlx::PgPool;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::shop::{Memory, create, shop};
use crate::support::{EFFECTS, command, free_port, url};

/// The request that the shop accepts, or `None` for one that has another form.
type Accept = fn(Request) -> Option<Request>;

/// Checks a service in this process. Its answers were right, and its effect happened once.
async fn assert_is_right(pool: &PgPool, request: &[&str], path: &str, accept: Accept) -> anyhow::Result<()> {
    create(pool).await?;
    let port = free_port();
    let file = std::env::temp_dir().join(format!("idempotency-check-{port}.json"));
    let mut check = tokio::process::Command::from(command())
        .args(["--database", &url(&pool.connect_options()), "--effects", EFFECTS, "--only", "5:lost-after"])
        .arg("--report")
        .arg(&file)
        .args(request)
        .arg(format!("http://127.0.0.1:{port}{path}"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut errors = BufReader::new(check.stderr.take().context("piped")?).lines();
    let line = errors.next_line().await?.context("a line")?;
    let through = line.strip_prefix("waiting for a service with DATABASE_URL=").context(line.clone())?;
    let service = Router::new().fallback_service(shop(PgPool::connect(through).await?, Memory::Right)).layer(from_fn(
        move |request: Request, next: Next| async move {
            match accept(request) {
                Some(request) => next.run(request).await,
                None => StatusCode::UNSUPPORTED_MEDIA_TYPE.into_response(),
            }
        },
    ));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let serving = tokio::spawn(async move { axum::serve(listener, service).await });
    let mut said = Vec::new();
    while let Some(line) = errors.next_line().await? {
        said.push(line);
    }
    serving.abort();
    anyhow::ensure!(check.wait().await?.code() == Some(0), "{said:#?}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    std::fs::remove_file(file)?;
    let tried = &report["tries"][0];
    let answers = tried["answers"].as_array().context("answers")?;
    let told: Vec<_> =
        answers.iter().filter_map(|it| Some((it["request"].as_str()?, it["status"].as_u64()?))).collect();
    assert_eq!(told, [("first", 500), ("retry", 201), ("again", 201), ("other-body", 422)]);
    assert_eq!(tried["effect"], serde_json::json!([["+1", "+100"]]));
    Ok(())
}

fn has(headers: &HeaderMap, content_type: Option<&str>) -> bool {
    headers.get("content-type").map(|value| value.as_bytes()) == content_type.map(str::as_bytes)
}

#[sqlx::test]
async fn a_form_is_sent_as_a_form(pool: PgPool) -> anyhow::Result<()> {
    let accept: Accept = |request| has(request.headers(), Some("application/x-www-form-urlencoded")).then_some(request);
    assert_is_right(&pool, &["--form", "currency=USD&amount=100"], "/payments", accept).await
}

#[sqlx::test]
async fn a_raw_body_has_no_content_type_but_that_of_a_header(pool: PgPool) -> anyhow::Result<()> {
    let accept: Accept = |request| has(request.headers(), None).then_some(request);
    assert_is_right(&pool, &["--body", "100 USD"], "/payments", accept).await?;
    let accept: Accept = |request| has(request.headers(), Some("text/plain")).then_some(request);
    let typed = ["--body", "100 USD", "-H", "Content-Type: text/plain"];
    assert_is_right(&pool, &typed, "/payments", accept).await
}

#[sqlx::test]
async fn the_key_may_be_a_part_of_the_url(pool: PgPool) -> anyhow::Result<()> {
    let accept: Accept = |mut request| {
        let key = request.uri().path().strip_prefix("/payments/")?.parse().ok()?;
        if request.method() != Method::PUT || request.headers_mut().insert("idempotency-key", key).is_some() {
            return None;
        }
        *request.uri_mut() = Uri::from_static("/payments");
        *request.method_mut() = Method::POST;
        Some(request)
    };
    assert_is_right(&pool, &["-X", "PUT", "--json", "{\"amount\":100}"], "/payments/{key}", accept).await
}
