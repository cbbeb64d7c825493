//! Runs of the program `idempotency-check`, and what its report says.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::database::{Database, TABLES};
use crate::port::free_port;

/// Far longer than a whole run takes, which is below two minutes for 30 messages.
const LIMIT: Duration = Duration::from_secs(900);
/// The program stops its service in this time.
const STOPS: Duration = Duration::from_secs(20);

pub(crate) const EFFECTS: &str = "select count(*), coalesce(sum(amount), 0) from payments";
const BODY: &str = r#"{"amount":100,"currency":"USD"}"#;

/// A service that the program starts and checks. Each has `POST /payments` and the table `payments`, unless it says
/// otherwise.
pub(crate) struct Service {
    pub(crate) name: &'static str,
    command: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    directory: PathBuf,
    port: u16,
    path: &'static str,
    body: &'static str,
    effects: &'static str,
    /// `None` for a service that creates its tables when it starts.
    tables: Option<&'static str>,
    options: Vec<&'static str>,
}

impl Service {
    /// `{port}` in the command is a free port.
    pub(crate) fn new(
        name: &'static str,
        command: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> anyhow::Result<Self> {
        let port = free_port();
        let fill =
            |part: &OsStr| part.to_str().map_or(part.into(), |part| part.replace("{port}", &port.to_string()).into());
        Ok(Self {
            name,
            command: command.into_iter().map(|part| fill(part.as_ref())).collect(),
            environment: vec![("PORT", port.to_string().into())],
            directory: ".".into(),
            port,
            path: "/payments",
            body: BODY,
            effects: EFFECTS,
            tables: Some(TABLES),
            options: vec!["-H", "X-User-ID: 42"],
        })
    }

    pub(crate) fn with_environment(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    pub(crate) fn with_directory(mut self, directory: &Path) -> Self {
        self.directory = directory.into();
        self
    }

    pub(crate) fn with_tables(mut self, tables: &'static str) -> Self {
        self.tables = Some(tables);
        self
    }

    pub(crate) fn with_own_tables(mut self) -> Self {
        self.tables = None;
        self
    }

    pub(crate) fn with_request(mut self, path: &'static str, body: &'static str, effects: &'static str) -> Self {
        (self.path, self.body, self.effects) = (path, body, effects);
        self
    }

    pub(crate) fn with_effects(mut self, effects: &'static str) -> Self {
        self.effects = effects;
        self
    }

    pub(crate) fn with_options(mut self, options: impl IntoIterator<Item = &'static str>) -> Self {
        self.options.extend(options);
        self
    }

    /// The process, once it listens.
    async fn start(&self, database: &Database) -> anyhow::Result<Child> {
        let (program, arguments) = self.command.split_first().context("a command")?;
        let mut command = Command::new(program);
        command.args(arguments).envs(self.environment.iter().cloned()).env("DATABASE_URL", database.url());
        let mut child = command.current_dir(&self.directory).kill_on_drop(true).spawn()?;
        tokio::select! {
            ended = child.wait() => anyhow::bail!("{} ended: {}", self.name, ended?),
            listens = timeout(LIMIT, listens(self.port)) => listens?,
        }
        Ok(child)
    }

    /// Sends these requests to the service, which is given a database of its own, and each again with its key in
    /// quotes. Each is a body for a target, under a key. Returns the fingerprint of each record.
    pub(crate) async fn fingerprints(&self, requests: &[(String, &str, &str)]) -> anyhow::Result<Vec<Vec<u8>>> {
        let database = Database::create(self.tables.unwrap_or_default()).await?;
        let mut child = self.start(&database).await?;
        let asked = async {
            let mut stored = Vec::new();
            for (key, target, body) in requests {
                let answer = self.post(key, target, body).await?;
                ensure!(answer.starts_with("HTTP/1.1 201 "), "{}: {target}: {answer}", self.name);
                // The layer takes a key in quotes and one without them for the same key, so the record is there.
                let quoted = self.post(&format!("\"{key}\""), target, body).await?;
                ensure!(quoted.lines().last() == answer.lines().last(), "{}: {answer}, then {quoted}", self.name);
                stored.push(database.fingerprint(key).await?);
            }
            anyhow::Ok(stored)
        };
        let stored = asked.await;
        child.kill().await?;
        database.drop().await?;
        stored
    }

    /// Sends these requests to the service, which is given a database of its own. Each is a body under a key. Returns
    /// the statuses of the answers.
    pub(crate) async fn statuses(&self, requests: &[(&str, &str)]) -> anyhow::Result<Vec<String>> {
        let database = Database::create(self.tables.unwrap_or_default()).await?;
        let mut child = self.start(&database).await?;
        let asked = async {
            let mut statuses = Vec::new();
            for (key, body) in requests {
                let answer = self.post(key, self.path, body).await?;
                statuses.push(answer.split(' ').nth(1).unwrap_or_default().to_owned());
            }
            anyhow::Ok(statuses)
        };
        let statuses = asked.await;
        child.kill().await?;
        database.drop().await?;
        statuses
    }

    /// Sends the target as it is, which a client that knows URLs would not.
    async fn post(&self, key: &str, target: &str, body: &str) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        let request = format!(
            "POST {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-User-ID: 42\r\nIdempotency-Key: {key}\r\n\
            Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// One run of the program, on a database of its own.
    pub(crate) async fn check(&self, options: &[&str]) -> anyhow::Result<Checked> {
        let database = Database::create(self.tables.unwrap_or_default()).await?;
        if self.tables.is_none() {
            // The check reads the effects before it starts the service.
            self.start(&database).await?.kill().await?;
        }
        let report = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{}.json", self.name, self.port));
        let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency-check"));
        command
            .args(["--database", &database.url(), "--effects", self.effects, "--json", self.body])
            .args(&self.options)
            .args(options)
            .arg("--report")
            .arg(&report)
            .arg(format!("http://127.0.0.1:{}{}", self.port, self.path))
            .arg("--")
            .args(&self.command)
            .envs(self.environment.iter().cloned())
            .current_dir(&self.directory);
        let output = ended(command).await;
        database.drop().await?;
        let output = output?;
        let printed =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
        let exit = output.status.code().with_context(|| format!("{}: {}", self.name, output.status))?;
        let written =
            std::fs::read(&report).with_context(|| format!("{}: exit {exit}, no report\n{printed}", self.name))?;
        std::fs::remove_file(&report)?;
        Ok(Checked { exit, report: serde_json::from_slice(&written)?, printed })
    }
}

/// Returns once something listens on this port.
async fn listens(port: u16) {
    while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        sleep(Duration::from_millis(50)).await;
    }
}

/// A run that hangs is terminated, so that it stops its service.
async fn ended(mut command: Command) -> anyhow::Result<Output> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let id = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let mut output = std::pin::pin!(child.wait_with_output());
    if let Ok(output) = timeout(LIMIT, &mut output).await {
        return Ok(output?);
    }
    kill_process(id.context("it has an id")?, Signal::TERM)?;
    let printed = timeout(STOPS, output).await??;
    anyhow::bail!("the check did not end within {LIMIT:?}\n{}", String::from_utf8_lossy(&printed.stderr))
}

pub(crate) struct Checked {
    pub(crate) exit: i32,
    pub(crate) report: Value,
    pub(crate) printed: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) verdict: String,
    /// The interruption, or the undisturbed check.
    pub(crate) by: String,
    /// The message that was interrupted, if one was.
    pub(crate) sql: String,
}

impl Checked {
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let findings = self.report["findings"].as_array().into_iter().flatten();
        let finding = |finding: &Value| {
            let by = if finding["check"].is_null() { &finding["interruption"] } else { &finding["check"] };
            Finding { verdict: text(&finding["verdict"]), by: text(by), sql: self.sql(&finding["message"]) }
        };
        findings.map(finding).collect()
    }

    fn sql(&self, number: &Value) -> String {
        let mut messages = self.messages();
        messages.find(|message| &message["number"] == number).map(|message| text(&message["sql"])).unwrap_or_default()
    }

    pub(crate) fn messages(&self) -> impl Iterator<Item = &Value> {
        self.report["messages"].as_array().into_iter().flatten()
    }

    /// The number of the message that commits the payment: the COMMIT after its insert, or the insert itself.
    pub(crate) fn commit_of_the_payment(&self) -> anyhow::Result<&Value> {
        let says = |message: &&Value, sql: &str| text(&message["sql"]).to_lowercase().contains(sql);
        let mut from_the_insert = self.messages().skip_while(|message| !says(message, "insert into payments"));
        let insert = from_the_insert.next().with_context(|| format!("no message inserts\n{}", self.printed))?;
        Ok(&from_the_insert.find(|message| says(message, "commit")).unwrap_or(insert)["number"])
    }

    /// How often an interruption took place.
    pub(crate) fn interruptions(&self) -> usize {
        let tries = self.report["tries"].as_array().into_iter().flatten();
        tries.filter(|tried| tried["reached"] == true).count()
    }

    pub(crate) fn ensure_clean(&self) -> anyhow::Result<()> {
        ensure!(self.exit == 0 && self.findings().is_empty(), "exit {}\n{}", self.exit, self.printed);
        Ok(())
    }
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
