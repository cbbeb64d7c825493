//! Clients that never end their requests: they keep nothing of a process from anybody for long.

use std::process::Stdio;
use std::time::Instant;

use rig::gate::PATIENCE;
use sqlx::{ConnectOptions as _, PgPool};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::{Process, command, expired};

/// A process with 256 descriptors, as some systems give them.
struct Daemon {
    _process: Process,
    address: String,
}

impl Daemon {
    fn start(pool: &PgPool, arguments: &[&str]) -> Self {
        let mut limited = std::process::Command::new("sh");
        limited.args(["-c", "ulimit -n 256; exec \"$@\"", "sh"]).arg(command().get_program());
        limited.args(arguments).arg("127.0.0.1:0");
        let url = pool.connect_options().to_url_lossy().to_string();
        limited.env("DATABASE_URL", url).env("IDEMPOTENCY_GRACE", "0s").stderr(Stdio::null());
        let process = Process::start(&mut limited);
        let (_, url) = process.said.split_once("http://").unwrap_or_else(|| panic!("{}", process.said));
        Self { address: url.split('/').next().expect("a part").trim().to_owned(), _process: process }
    }

    async fn status(&self, path: &str) -> anyhow::Result<u16> {
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build()?;
        Ok(client.get(format!("http://{}{path}", self.address)).send().await?.status().as_u16())
    }

    async fn half_requests(&self) -> anyhow::Result<Vec<TcpStream>> {
        let mut slow = Vec::new();
        for n in 0..240 {
            let mut client = TcpStream::connect(&self.address).await?;
            client.write_all(HALF_REQUESTS[n % 3].as_bytes()).await?;
            slow.push(client);
        }
        Ok(slow)
    }
}

/// None of them ends. The last one has a header, and its body does not come.
const HALF_REQUESTS: [&str; 3] = [
    "",
    "GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "POST /find HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\n",
];

/// Ends the daemon's connections, so that it needs new ones.
async fn disconnect(pool: &PgPool) -> anyhow::Result<()> {
    // In a case: conditions have no order, and the others' backends are not to be ended.
    let ended = "select count(*) from pg_stat_activity
        where case when datname = current_database() and application_name = 'idempotency-janitor'
            then pg_terminate_backend(pid) end";
    sqlx::query(ended).execute(pool).await?;
    Ok(())
}

async fn all_end(slow: Vec<TcpStream>) -> anyhow::Result<()> {
    for mut client in slow {
        let ended = timeout(PATIENCE, async {
            let mut bytes = Vec::new();
            // A reset is an end too.
            let _ = client.read_to_end(&mut bytes).await;
        });
        ended.await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn half_requests_leave_the_probe_the_metrics_and_the_sweep_alone(pool: PgPool) -> anyhow::Result<()> {
    let daemon = Daemon::start(&pool, &["run", "--interval", "1s", "--metrics-addr"]);
    let slow = daemon.half_requests().await?;
    for path in ["/healthz", "/metrics", "/healthz"] {
        disconnect(&pool).await?;
        expired(&pool, 10).await?;
        let started = Instant::now();
        while sqlx::query_scalar::<_, bool>("select exists (select from idempotency.record)").fetch_one(&pool).await? {
            assert!(started.elapsed() < PATIENCE, "the sweep goes on");
        }
        assert_eq!(daemon.status(path).await?, 200);
    }
    all_end(slow).await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_console_ends_half_requests_and_serves_whoever_comes_after(pool: PgPool) -> anyhow::Result<()> {
    let console = Daemon::start(&pool, &["console", "--listen"]);
    all_end(console.half_requests().await?).await?;
    assert_eq!(console.status("/").await?, 200);
    Ok(())
}
