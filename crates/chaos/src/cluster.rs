//! A PostgreSQL of the suite's own, with fsync on, which can be killed and started again. It ends when this process
//! ends, also by SIGKILL, because `script/postgres` has the other end of a pipe.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rig::child::Kept;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use tokio::time::sleep;

/// Recovery takes a second, and longer on a machine that builds beside it.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Cluster {
    keeper: Mutex<Kept>,
    directory: PathBuf,
    /// The way to the database `postgres`, which no scenario uses.
    options: PgConnectOptions,
}

impl Cluster {
    /// `environment` is added to the server's own, such as another clock.
    pub(crate) async fn start(environment: &[(&str, &str)]) -> anyhow::Result<Self> {
        let mut command = Command::new(root().join("script/postgres"));
        let keeper = Kept::start(command.arg("serve").envs(environment.iter().copied()).env_remove("PG_FSYNC"))?;
        let options: PgConnectOptions = keeper.said.parse()?;
        let directory = options.get_socket().context("a server on a Unix socket")?.clone();
        let cluster = Self { keeper: Mutex::new(keeper), directory, options };
        // The WAL writer writes asynchronous commits. It does so late, so that a mistake shows.
        cluster.set("wal_writer_delay = '10s'").await?;
        Ok(cluster)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Creates a database, and removes all earlier ones, because at each start after a crash the server reads every
    /// file of every database.
    pub(crate) async fn create_database(&self, name: &str) -> anyhow::Result<PgConnectOptions> {
        let mut conn = PgConnection::connect_with(&self.options).await?;
        let old: Vec<String> =
            sqlx::query_scalar("select datname from pg_database where not datistemplate and datname <> 'postgres'")
                .fetch_all(&mut conn)
                .await?;
        for old in old {
            conn.execute(AssertSqlSafe(format!("drop database \"{old}\" with (force)"))).await?;
        }
        conn.close().await?;
        create_database(&self.options, name).await
    }

    /// `alter system set`, with effect at once.
    pub(crate) async fn set(&self, setting: &str) -> anyhow::Result<()> {
        let mut conn = PgConnection::connect_with(&self.options).await?;
        conn.execute(AssertSqlSafe(format!("alter system set {setting}"))).await?;
        conn.execute("select pg_reload_conf()").await?;
        conn.close().await?;
        Ok(())
    }

    pub(crate) fn postmaster(&self) -> anyhow::Result<u32> {
        let file = std::fs::read_to_string(self.data().join("postmaster.pid")).context("no postmaster runs")?;
        file.lines().next().context("an empty postmaster.pid")?.parse().context("postmaster.pid holds no number")
    }

    /// SIGKILL to the postmaster. Its backends end when they notice.
    pub(crate) fn kill(&self) -> anyhow::Result<()> {
        signal("-KILL", self.postmaster()?)
    }

    /// Starts a server that was killed, and waits until it answers.
    pub(crate) async fn start_again(&self) -> anyhow::Result<()> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner).tell("start")?;
        self.answers().await
    }

    /// Waits until the server answers.
    pub(crate) async fn answers(&self) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            match PgConnection::connect_with(&self.options).await {
                Ok(conn) => return Ok(conn.close().await?),
                Err(error) if started.elapsed() > PATIENCE => bail!("the server does not come up again: {error}"),
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }
}

pub(crate) async fn create_database(options: &PgConnectOptions, name: &str) -> anyhow::Result<PgConnectOptions> {
    let mut conn = PgConnection::connect_with(options).await?;
    conn.execute(AssertSqlSafe(format!("create database \"{name}\""))).await?;
    conn.close().await?;
    Ok(options.clone().database(name))
}

/// The way to the database `postgres` of the server, or of the proxy, at this port.
pub(crate) fn on_port(port: u16) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(port)
        .username("postgres")
        .database("postgres")
        .ssl_mode(PgSslMode::Disable)
}

pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Runs the system's `kill`, because a system call would need `unsafe` code.
pub(crate) fn signal(signal: &str, process: u32) -> anyhow::Result<()> {
    let sent = Command::new("kill").args([signal, &process.to_string()]).stderr(Stdio::null()).status()?;
    ensure!(sent.success(), "kill {signal} {process}: {sent}");
    Ok(())
}

/// Ports in a row. They are below the range of outgoing connections, because a port must still be free when a server
/// that was killed comes back.
pub(crate) fn free_ports<const COUNT: usize>() -> anyhow::Result<[u16; COUNT]> {
    const FIRST: u16 = 20_000;
    const LAST: u16 = 32_000;
    let offset = u16::try_from(std::process::id() % u32::from(LAST - FIRST))?;
    let mut row = Vec::new();
    for port in (FIRST + offset..LAST).chain(FIRST..FIRST + offset) {
        if TcpListener::bind(("127.0.0.1", port)).is_err() || row.last().is_some_and(|last| last + 1 != port) {
            row.clear();
            continue;
        }
        row.push(port);
        if let Ok(ports) = row.as_slice().try_into() {
            return Ok(ports);
        }
    }
    bail!("no {COUNT} free ports in a row")
}
