//! Running the binary, and a server of a test's own.

use std::process::{Command, Output};

use pg_idempotency::{Key, testing};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgPool};

/// The binary, with nothing of this process's environment that it reads itself.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency-janitor"));
    for variable in ["DATABASE_URL", "PGPASSWORD", "RUST_LOG"] {
        command.env_remove(variable);
    }
    command
}

pub(crate) fn janitor(arguments: &[&str]) -> Output {
    command().args(arguments).output().expect("the binary runs")
}

/// On the database of this test.
pub(crate) fn janitor_on(options: &PgConnectOptions, arguments: &[&str]) -> Output {
    command_on(options).args(arguments).output().expect("the binary runs")
}

pub(crate) fn command_on(options: &PgConnectOptions) -> Command {
    let mut command = command();
    command.env("DATABASE_URL", options.to_url_lossy().to_string());
    command
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// The error is one line, and names what it should.
pub(crate) fn assert_fails(output: &Output, code: i32, says: &str) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains(says), "{error}");
}

pub(crate) fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

pub(crate) async fn expired(pool: &PgPool, count: i32) -> anyhow::Result<()> {
    for n in 0..count {
        let key = Key::new("scope", "operation", n.to_string())?;
        testing::expired(&mut *pool.acquire().await?, &key, "body", &n).await?;
    }
    Ok(())
}
