use std::process::{Command, Output};
use std::sync::Arc;

use idempotency_check::{Answer, Check, Report, Try, Verdict};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgPool};
use tokio::sync::OnceCell;

pub(crate) use crate::port::free_port;
use crate::shop::{Memory, create, memory, shop};

pub(crate) const EFFECTS: &str = "select count(*), coalesce(sum(amount), 0) from payments";

pub(crate) fn url(options: &PgConnectOptions) -> String {
    options.to_url_lossy().into()
}

pub(crate) fn is_open(port: u16) -> bool {
    std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// Sends the request of a payment.
pub(crate) async fn pay(at: &str, key: &str) -> anyhow::Result<Answer> {
    let request = reqwest::Client::new().post(at).header("idempotency-key", key).body("{\"amount\":100}");
    let response = request.send().await?;
    Ok(Answer::new(response.status().as_u16(), response.bytes().await?))
}

/// A check of the shop in this process.
pub(crate) async fn check(options: &PgConnectOptions, memory: Memory) -> anyhow::Result<Check> {
    create(&PgPool::connect_with(options.clone()).await?).await?;
    let service = Arc::new(OnceCell::new());
    Ok(Check::new(url(options)).effects(EFFECTS).call(async move |database: String, key: String| {
        let at = service.get_or_try_init(|| serve(&database, memory)).await?;
        pay(at, &key).await
    }))
}

async fn serve(database: &str, memory: Memory) -> anyhow::Result<String> {
    let pool = PgPool::connect(database).await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let at = format!("http://{}/payments", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, shop(pool, memory)).await });
    Ok(at)
}

/// The findings with this verdict.
pub(crate) fn with(report: &Report, verdict: Verdict) -> Vec<&Try> {
    report.findings.iter().filter(|finding| finding.verdict == Some(verdict)).collect()
}

/// The shop as a process of its own: this program, whose one test that is ignored serves.
pub(crate) fn as_a_process(port: u16, memory: &str) -> [String; 6] {
    let program = std::env::current_exe().expect("a path").to_string_lossy().into_owned();
    let serves = ["--ignored", "--exact", "support::serves"].map(ToOwned::to_owned);
    let [ignored, exact, serves] = serves;
    ["env".to_owned(), format!("SHOP={port} {memory}"), program, ignored, exact, serves]
}

#[tokio::test]
#[ignore = "the other tests start it as a process"]
async fn serves() -> anyhow::Result<()> {
    let Ok(shop) = std::env::var("SHOP") else { return Ok(()) };
    let (port, name) = shop.split_once(' ').expect("a port and a memory");
    crate::shop::serve(port.parse()?, memory(name)).await
}

pub(crate) fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_idempotency-check"))
}

/// Of the database of this test and the service on this port.
pub(crate) fn command_on(options: &PgConnectOptions, port: u16, more: &[&str], memory: &str) -> Command {
    let mut command = command();
    command.args(["--database", &url(options), "--effects", EFFECTS, "--json", "{\"amount\":100}"]);
    command.args(more).arg(format!("http://127.0.0.1:{port}/payments"));
    command.arg("--").args(as_a_process(port, memory));
    command
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// One line that says this, and the exit code 2.
pub(crate) fn assert_cannot_run(output: &Output, says: &str) {
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    let said: Vec<_> = errors.lines().filter(|line| line.starts_with("idempotency-check: ")).collect();
    assert_eq!(said.len(), 1, "{errors}");
    assert!(said[0].contains(says), "{errors}");
}
