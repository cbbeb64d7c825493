//! Running the binary, and a server of a test's own.

use std::process::{Command, Output};
use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::{Key, testing};
use rig::child::Kept;
use rig::fixture::Fixture;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgPool};

/// The binary, with nothing of this process's environment that it reads itself.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency-janitor"));
    for variable in ["DATABASE_URL", "PGPASSWORD", "RUST_LOG"] {
        command.env_remove(variable);
    }
    // What these tests let expire is swept at once.
    command.env("IDEMPOTENCY_GRACE", "0s");
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
        Fixture::completed(&key, "body", &n)?.expired().write(pool).await?;
    }
    Ok(())
}

pub(crate) const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
pub(crate) const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: Duration::from_secs(40) };

/// Claims a key, whose body is "body", and lets the lease lapse. Gives its downstream key.
pub(crate) async fn lapsed(pool: &PgPool, key: &Key, policy: Policy) -> anyhow::Result<String> {
    let acquired = LeaseOptions::new(policy).acquire::<serde_json::Value, _>(pool, key, "body").await?;
    let Acquired::Owner(lease) = acquired else { anyhow::bail!("it is completed") };
    testing::lapse(pool, key).await?;
    Ok(lease.downstream_key())
}

pub(crate) const IN_STEPS: Policy = Policy::InSteps { lease: Duration::from_secs(40) };

/// An operation whose body is "body", whose owner died in the step `text`, after it had finished the step `ride` with
/// the result 1. Gives the downstream key of `text`.
pub(crate) async fn in_doubt(pool: &PgPool, key: &Key) -> anyhow::Result<String> {
    let leasing = LeaseOptions::new(IN_STEPS).store_request(true);
    let acquired = leasing.acquire::<serde_json::Value, _>(pool, key, "body").await?;
    let Acquired::Owner(lease) = acquired else { anyhow::bail!("it is completed") };
    lease.step_at_least_once("ride", async |_| anyhow::Ok(1)).await?;
    let mut sent = String::new();
    let text = lease.step_at_most_once("text", async |step| -> anyhow::Result<i64> {
        sent = step.downstream_key().to_owned();
        anyhow::bail!("the gateway closed the connection")
    });
    text.await.expect_err("in doubt");
    testing::lapse(pool, key).await?;
    Ok(sent)
}

/// An operation in steps whose owner died in several steps at once. The step `ride` is finished.
pub(crate) async fn in_doubt_at(pool: &PgPool, key: &Key, steps: &[&str]) -> anyhow::Result<()> {
    let lapsed = Fixture::lapsed(key, "body", IN_STEPS)?.with_step("ride", &1);
    let lapsed = steps.iter().fold(lapsed, |lapsed, step| lapsed.with_step_in_doubt(step));
    Ok(lapsed.write(pool).await?)
}

/// A caller who commits after an error: indeterminate, in transaction mode.
pub(crate) async fn committed_after_an_error(pool: &PgPool, key: &Key) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    pg_idempotency::ensure_idempotent(&mut tx, key, "body", async |_| -> anyhow::Result<i64> {
        anyhow::bail!("on purpose")
    })
    .await
    .expect_err("perform fails");
    Ok(tx.commit().await?)
}

/// A server of the test's own, since what is set for a role holds in every database. It goes with this value.
pub(crate) struct Server {
    pub(crate) url: String,
    _keeper: Kept,
}

impl Server {
    /// As durable as servers are. It asks for this password at each login.
    pub(crate) fn start(password: Option<&str>) -> anyhow::Result<Self> {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../script/postgres"));
        command.arg("serve").env_remove("PG_FSYNC");
        if let Some(password) = password {
            command.env("PG_PASSWORD", password);
        }
        let keeper = Kept::start(&mut command)?;
        Ok(Self { url: keeper.said.clone(), _keeper: keeper })
    }
}
