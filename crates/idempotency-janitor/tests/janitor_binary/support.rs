//! Running the binary, and a server of a test's own.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Key, testing};
use rig::child::Kept;
use rig::database::options;
use rig::fixture::Fixture;
use rig::lease::owner;
pub(crate) use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
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
pub(crate) fn janitor_on(pool: &PgPool, arguments: &[&str]) -> Output {
    command_on(pool).args(arguments).output().expect("the binary runs")
}

pub(crate) fn janitor_as(pool: &PgPool, role: &str, arguments: &[&str]) -> Output {
    command_at(&options(pool).username(role)).args(arguments).output().expect("the binary runs")
}

pub(crate) fn command_on(pool: &PgPool) -> Command {
    command_at(&pool.connect_options())
}

pub(crate) fn command_at(options: &PgConnectOptions) -> Command {
    let mut command = command();
    command.env("DATABASE_URL", options.to_url_lossy().to_string());
    command
}

/// The binary as a process that goes on, and the line that it prints first. It ends with this value, and also when the
/// test is killed.
pub(crate) struct Process {
    process: Child,
    watcher: Child,
    pub(crate) said: String,
    /// What it prints afterwards.
    pub(crate) output: Option<BufReader<ChildStdout>>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().expect("the binary runs");
        // Its own process group, since a test runner that is killed takes its group with it.
        let mut watcher = Command::new("sh");
        watcher.args(["-c", "cat >/dev/null; kill -KILL $1", "watcher", &process.id().to_string()]).process_group(0);
        let watcher = watcher.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("sh runs");
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        let mut said = String::new();
        output.read_line(&mut said).expect("UTF-8");
        Self { process, watcher, said, output: Some(output) }
    }

    /// Ends it as its service manager does, and gives what it has printed since.
    pub(crate) fn terminate(mut self) -> String {
        let process = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &process]).status().expect("kill runs").success());
        let mut printed = String::new();
        self.output.take().expect("read by nobody else").read_to_string(&mut printed).expect("UTF-8");
        assert_eq!(self.process.wait().expect("it ends").code(), Some(0), "{printed}");
        printed
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        for process in [&mut self.watcher, &mut self.process] {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
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

/// The `seen` of a record as `show` prints it now. A key without a record has none.
pub(crate) fn seen_on(pool: &PgPool, named: &[&str]) -> String {
    let shown = janitor_on(pool, &[&["show", "--json"], named].concat());
    let seen = |shown: serde_json::Value| shown["seen"].as_str().expect("text").to_owned();
    serde_json::from_slice(&shown.stdout).map_or_else(|_| "nothing".to_owned(), seen)
}

/// Looks, and decides about what it saw, as a script does. The key comes after the name of the command.
pub(crate) fn decide_on(pool: &PgPool, arguments: &[&str]) -> Output {
    let seen = seen_on(pool, &arguments[1..4]);
    janitor_on(pool, &[arguments, &["--seen", &seen]].concat())
}

pub(crate) fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// What `src/guide/production.md` grants to this role, as rights of `@role`.
pub(crate) fn granted_to(role: &str) -> String {
    let lines = include_str!("../../../../src/guide/production.md").lines();
    let grants = lines.filter(|line| line.starts_with("grant ") && line.contains(role));
    grants.map(|line| format!("{} to @role;", line.split(" to ").next().unwrap_or_default())).collect()
}

pub(crate) async fn expired(pool: &PgPool, count: i32) -> anyhow::Result<()> {
    for n in 0..count {
        let key = Key::new("scope", "operation", n.to_string())?;
        Fixture::completed(&key, "body", &n)?.expired().write(pool).await?;
    }
    Ok(())
}

/// Claims a key, whose body is "body", and lets the lease lapse. Gives its downstream key.
pub(crate) async fn lapsed(pool: &PgPool, key: &Key, policy: Policy) -> anyhow::Result<String> {
    let lease = owner(pool, LeaseOptions::new(policy), key).await;
    testing::lapse(pool, key).await?;
    Ok(lease.downstream_key())
}

/// An operation whose body is "body", whose owner died in the step `text`, after it had finished the step `ride` with
/// the result 1. Gives the downstream key of `text`.
pub(crate) async fn in_doubt(pool: &PgPool, key: &Key) -> anyhow::Result<String> {
    let lease = owner(pool, LeaseOptions::new(IN_STEPS).store_request(true), key).await;
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

/// The caller commits after an error, so the key is indeterminate in transaction mode.
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
