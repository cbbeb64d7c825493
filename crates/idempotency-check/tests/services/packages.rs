//! Services in Python and Node. Those that call the SQL functions of pg-idempotency have to be right. What is found in
//! a package is recorded for docs/checked.md, and fails no test: the packages are not ours.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::ensure;

use crate::installed::{directory, node_modules, python};
use crate::page::{self, is_whole};
use crate::program::Service;
use crate::redis::Redis;
use crate::skipped;

/// Starts `python` with the packages after `before`. `None` where there is no Python.
pub(crate) fn in_python(name: &'static str, before: &str, module: &str) -> anyhow::Result<Option<Service>> {
    let python = match python() {
        Ok(python) => python.display(),
        Err(reason) => return Ok(skipped(name, reason)),
    };
    let uvicorn = format!("-m uvicorn --host 127.0.0.1 --port $PORT --log-level warning {module}:app");
    let service = Service::new(name, ["sh", "-c", &format!("python={python}; {before} exec $python {uvicorn}")])?;
    // Python would write compiled files beside the sources.
    Ok(Some(service.with_directory(&directory("python")).with_environment("PYTHONDONTWRITEBYTECODE", "1")))
}

/// `None` where there is no Node.
pub(crate) fn in_node(name: &'static str, file: &str) -> anyhow::Result<Option<Service>> {
    let node_modules = match node_modules() {
        Ok(node_modules) => node_modules,
        Err(reason) => return Ok(skipped(name, reason)),
    };
    let service = Service::new(name, ["node", file])?.with_directory(&directory("node"));
    Ok(Some(service.with_environment("NODE_PATH", node_modules)))
}

/// Every interruption, of which none may find anything.
async fn right(service: Option<Service>) -> anyhow::Result<()> {
    let Some(service) = service else { return Ok(()) };
    let service = service.with_options(["--other-header", "X-User-ID: 43"]);
    let checked = service.check(&[]).await?;
    page::record(service.name, &checked)?;
    checked.ensure_clean()
}

/// What the test of a package knows of it. docs/checked.md says all of it.
pub(crate) struct Package {
    needs_redis: bool,
    /// How long a client retries before a key is called stuck.
    pub(crate) patience: &'static str,
    /// After which time the package releases a claim of a process that is gone.
    pub(crate) claim: &'static str,
    /// A status after which a client retries, besides those of the program.
    pub(crate) again: Option<&'static str>,
}

/// The claims last far longer, so that more patience would show nothing else.
pub(crate) const IN_REDIS: Package = Package { needs_redis: true, patience: "10s", claim: "five minutes", again: None };

/// It documents 423 as an answer after which a client retries. A claim that is taken over is not stuck before.
pub(crate) const IDEMKIT: Package = Package { needs_redis: false, patience: "40s", claim: "30s", again: Some("423") };

/// Records what is found, and asserts that the run worked. No package is asked to tell two users apart: only the quick
/// start of idemkit knows users.
async fn package(service: Option<Service>, package: Package) -> anyhow::Result<()> {
    let Some(mut service) = service else { return Ok(()) };
    let redis = match package.needs_redis.then(Redis::start).transpose() {
        Ok(redis) => redis,
        Err(error) => {
            skipped::<()>(service.name, &format!("{error:#}"));
            return Ok(());
        }
    };
    if let Some(redis) = &redis {
        service = service.with_environment("REDIS_SOCKET", &redis.socket);
    }
    // The default of the program, and one more.
    let again = package.again.map(|status| format!("202,409,425,429,500,502,503,504,{status}"));
    let again = again.as_deref().map_or(Vec::new(), |statuses| vec!["--again", statuses]);
    let checked = if is_whole() {
        service.check(&[&again[..], &["--patience", package.patience]].concat()).await?
    } else {
        let quick = [&again[..], &["--patience", "3s", "--only"]].concat();
        let first = service.check(&[&quick[..], &["1:lost-before"]].concat()).await?;
        let commit = first.commit_of_the_payment()?;
        service.check(&[&quick[..], &[&format!("{commit}:lost-after")]].concat()).await?
    };
    ensure!(checked.exit <= 1 && checked.interruptions() > 0, "exit {}\n{}", checked.exit, checked.printed);
    page::record(service.name, &checked)?;
    writeln!(std::io::stderr(), "{}: {:?}", service.name, checked.findings())?;
    Ok(())
}

/// The schema of pg-idempotency with its functions for other languages, and the payments.
pub(crate) const WITH_FUNCTIONS: &str = concat!(
    "create schema idempotency;",
    include_str!("../../../../migrations/0001_create_record.sql"),
    include_str!("../../../../migrations/any-language.sql"),
    include_str!("tables.sql"),
    include_str!("plpgsql.sql"),
);

/// The programs of the guide's page on any language.
pub(crate) fn guide() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src/guide/any_language")
}

/// A client that gets a 503 sends the same request again. So only a failure that may pass is a 503, and not a request
/// that the program or the database refuses each time.
async fn answers_each_mistake_as_what_it_is(service: Option<Service>) -> anyhow::Result<()> {
    const RAISES: &str = "
        create function fail() returns trigger language plpgsql as $$
        begin
            raise exception 'as the test wants' using errcode = new.currency;
        end
        $$;
        create trigger fail before insert on payments
            for each row when (new.currency <> 'USD') execute function fail()";
    let Some(service) = service else { return Ok(()) };
    let long = "x".repeat(256);
    let mut expected = Vec::new();
    let mut requests = Vec::new();
    for (key, body, status) in [
        ("good", r#"{"amount":100,"currency":"USD"}"#, "201"),
        ("not JSON", r#"{"amount":"#, "400"),
        ("no object", "[]", "400"),
        ("a null", "null", "400"),
        ("no amount", r#"{"currency":"USD"}"#, "400"),
        ("no number", r#"{"amount":"ten","currency":"USD"}"#, "400"),
        // IK008.
        (&long, r#"{"amount":100,"currency":"USD"}"#, "400"),
        ("good", r#"{"amount":101,"currency":"USD"}"#, "422"),
        ("a serialization failure", r#"{"amount":100,"currency":"40001"}"#, "503"),
        ("a deadlock", r#"{"amount":100,"currency":"40P01"}"#, "503"),
        ("a shutdown", r#"{"amount":100,"currency":"57P01"}"#, "503"),
        ("a refused row", r#"{"amount":100,"currency":"23514"}"#, "400"),
        ("no right", r#"{"amount":100,"currency":"42501"}"#, "500"),
        ("good", r#"{"amount":100,"currency":"USD"}"#, "201"),
    ] {
        requests.push((key, body));
        expected.push((key, status.to_owned()));
    }
    let tables: &'static str = format!("{WITH_FUNCTIONS};{RAISES}").leak();
    let statuses = service.with_directory(&guide()).with_tables(tables).statuses(&requests).await?;
    let answered: Vec<_> = requests.iter().map(|(key, _)| *key).zip(statuses).collect();
    assert_eq!(answered, expected);
    Ok(())
}

#[tokio::test]
async fn fastapi_and_psycopg_answer_each_mistake_as_what_it_is() -> anyhow::Result<()> {
    answers_each_mistake_as_what_it_is(in_python("fastapi", "", "payments")?).await
}

#[tokio::test]
async fn node_and_pg_answer_each_mistake_as_what_it_is() -> anyhow::Result<()> {
    answers_each_mistake_as_what_it_is(in_node("node", "payments.js")?).await
}

#[tokio::test]
async fn fastapi_and_psycopg_on_the_sql_functions_are_right() -> anyhow::Result<()> {
    let service = in_python("fastapi", "", "payments")?;
    right(service.map(|service| service.with_directory(&guide()).with_tables(WITH_FUNCTIONS))).await
}

#[tokio::test]
async fn node_and_pg_on_the_sql_functions_are_right() -> anyhow::Result<()> {
    let service = in_node("node", "payments.js")?;
    right(service.map(|service| service.with_directory(&guide()).with_tables(WITH_FUNCTIONS))).await
}

#[tokio::test]
async fn plpgsql_alone_on_the_sql_functions_is_right() -> anyhow::Result<()> {
    right(in_node("plpgsql", "plpgsql.js")?.map(|service| service.with_tables(WITH_FUNCTIONS))).await
}

#[tokio::test]
async fn asgi_idempotency_header_is_checked() -> anyhow::Result<()> {
    package(in_python("asgi-idempotency-header", "", "with_asgi_idempotency_header")?, IN_REDIS).await
}

#[tokio::test]
async fn idemkit_is_checked() -> anyhow::Result<()> {
    // Its table is created at each start, which changes nothing the second time.
    let before = "$(dirname $python)/idemkit init-pg $DATABASE_URL &&";
    package(in_python("idemkit", before, "with_idemkit")?, IDEMKIT).await
}

#[tokio::test]
async fn idemptx_is_checked() -> anyhow::Result<()> {
    package(in_python("idemptx", "", "with_idemptx")?, IN_REDIS).await
}

#[tokio::test]
async fn express_idempotency_is_checked() -> anyhow::Result<()> {
    package(in_node("express-idempotency", "with_express_idempotency.js")?, IN_REDIS).await
}

#[tokio::test]
async fn node_idempotency_is_checked() -> anyhow::Result<()> {
    package(in_node("node-idempotency", "with_node_idempotency.js")?, IN_REDIS).await
}
