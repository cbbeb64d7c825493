//! `/healthz`: whether the database answers, without a new connection for each time that somebody asks.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;

use crate::support::command;

/// Stands between the daemon and the server, and counts connections. It can stop passing anything on, for good: a
/// server that hangs, or a network that is lost without a word. New connections pass again after [`Line::mend`].
pub(crate) struct Line {
    pub(crate) port: u16,
    connections: Arc<AtomicUsize>,
    open: Arc<Mutex<watch::Sender<bool>>>,
    /// Kept, since a connection whose sender is gone is closed.
    lost: Vec<watch::Sender<bool>>,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Line {
    pub(crate) async fn to(server: &PgConnectOptions) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let connections = Arc::new(AtomicUsize::new(0));
        let open = Arc::new(Mutex::new(watch::Sender::new(true)));
        let (counted, current, server) = (connections.clone(), open.clone(), server.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                let Ok(server) = connect(&server).await else { continue };
                let passes = current.lock().expect("nobody panics").subscribe();
                let (from_client, to_client) = tokio::io::split(client);
                let (from_server, to_server) = tokio::io::split(server);
                tokio::spawn(pass_on(from_client, to_server, passes.clone()));
                tokio::spawn(pass_on(from_server, to_client, passes.clone()));
            }
        });
        Ok(Self { port, connections, open, lost: Vec::new() })
    }

    pub(crate) fn lose(&self) {
        self.open.lock().expect("nobody panics").send_replace(false);
    }

    pub(crate) fn mend(&mut self) {
        let mut open = self.open.lock().expect("nobody panics");
        self.lost.push(std::mem::replace(&mut *open, watch::Sender::new(true)));
    }
}

async fn connect(server: &PgConnectOptions) -> std::io::Result<Box<dyn Stream>> {
    let port = server.get_port();
    Ok(match server.get_socket() {
        Some(directory) => Box::new(UnixStream::connect(directory.join(format!(".s.PGSQL.{port}"))).await?),
        None => Box::new(TcpStream::connect((server.get_host(), port)).await?),
    })
}

async fn pass_on(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut open: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let mut bytes = [0; 8192];
    loop {
        let read = from.read(&mut bytes).await?;
        if read == 0 {
            return Ok(to.shutdown().await?);
        }
        open.wait_for(|open| *open).await?;
        to.write_all(&bytes[..read]).await?;
    }
}

/// The daemon, behind such a line. It sweeps once at its start, and not again.
struct Daemon {
    process: Child,
    healthz: String,
}

impl Daemon {
    fn start(line: &Line, server: &PgConnectOptions) -> anyhow::Result<Self> {
        let database = server.get_database().expect("a database");
        let url = format!("postgres://{}@127.0.0.1:{}/{database}", server.get_username(), line.port);
        let mut process = command()
            .args(["run", "--interval", "1h", "--metrics-addr", "127.0.0.1:0"])
            .env("DATABASE_URL", url)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut said = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut said)?;
        let metrics = said.trim().strip_prefix("metrics on ").expect("its address").to_owned();
        Ok(Self { process, healthz: metrics.replace("/metrics", "/healthz") })
    }

    async fn probe(&self) -> anyhow::Result<(u16, Duration)> {
        let started = Instant::now();
        let status = reqwest::get(&self.healthz).await?.status().as_u16();
        Ok((status, started.elapsed()))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn probes_share_one_connection_and_say_when_the_database_hangs(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let mut line = Line::to(&options).await?;
    let daemon = Daemon::start(&line, &options)?;
    for _ in 0..20 {
        assert_eq!(daemon.probe().await?.0, 200);
    }
    let opened = line.connections.load(Ordering::SeqCst);
    assert!(opened <= 2, "one to sweep and one to probe, not {opened}");

    line.lose();
    for _ in 0..2 {
        let (status, took) = daemon.probe().await?;
        assert_eq!(status, 503);
        assert!(took < Duration::from_secs(4), "in time: {took:?}");
    }
    line.mend();
    assert_eq!(daemon.probe().await?.0, 200, "as soon as it answers");
    Ok(())
}

/// As a restart of the server does.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_broken_connection_is_replaced_within_the_probe(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let line = Line::to(&options).await?;
    let daemon = Daemon::start(&line, &options)?;
    assert_eq!(daemon.probe().await?.0, 200);
    let ended: i64 = sqlx::query_scalar(
        // In a case: conditions have no order, and the others' backends are not to be ended.
        "select count(*) from pg_stat_activity
         where case when datname = current_database() and application_name = 'idempotency-janitor'
             then pg_terminate_backend(pid) end",
    )
    .fetch_one(&pool)
    .await?;
    assert!(ended >= 1);
    assert_eq!(daemon.probe().await?.0, 200);
    Ok(())
}
