//! Clients that never end their requests: they keep nothing of the daemon from anybody for long.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::Instant;

use pg_idempotency::testing::PATIENCE;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, PgPool};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::{command, expired};

/// The daemon with 256 descriptors, as some systems give them.
struct Daemon {
    process: Child,
    metrics: String,
    console: String,
}

impl Daemon {
    fn start(options: &PgConnectOptions) -> anyhow::Result<Self> {
        let janitor = command();
        let mut limited = std::process::Command::new("sh");
        limited.args(["-c", "ulimit -n 256; exec \"$@\"", "sh"]).arg(janitor.get_program());
        limited.args(["run", "--interval", "1s", "--metrics-addr", "127.0.0.1:0", "--console-addr", "127.0.0.1:0"]);
        limited.env("DATABASE_URL", options.to_url_lossy().to_string()).env("IDEMPOTENCY_GRACE", "0s");
        let mut process = limited.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let mut address = |name: &str| -> anyhow::Result<String> {
            let line = lines.next().expect("an address")?;
            let url = line.strip_prefix(name).unwrap_or_else(|| panic!("{line}"));
            Ok(url.trim_start_matches("http://").split('/').next().expect("a part").to_owned())
        };
        let (metrics, console) = (address("metrics on ")?, address("console on ")?);
        Ok(Self { process, metrics, console })
    }

    async fn status(&self, address: &str, path: &str) -> anyhow::Result<u16> {
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build()?;
        Ok(client.get(format!("http://{address}{path}")).send().await?.status().as_u16())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
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

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn half_requests_leave_the_probe_the_metrics_and_the_sweep_alone(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let daemon = Daemon::start(&options)?;
    assert_eq!(daemon.status(&daemon.console, "/").await?, 200);
    let mut slow = Vec::new();
    for n in 0..240 {
        let mut client = TcpStream::connect(&daemon.console).await?;
        client.write_all(HALF_REQUESTS[n % 3].as_bytes()).await?;
        slow.push(client);
    }
    for _ in 0..3 {
        disconnect(&pool).await?;
        assert_eq!(daemon.status(&daemon.metrics, "/healthz").await?, 200);
        assert_eq!(daemon.status(&daemon.metrics, "/metrics").await?, 200);
        expired(&pool, 10).await?;
        let started = Instant::now();
        while sqlx::query_scalar::<_, bool>("select exists (select from idempotency.record)").fetch_one(&pool).await? {
            assert!(started.elapsed() < PATIENCE, "the sweep goes on");
        }
    }
    // The console ends them, and serves whoever came after them.
    for client in &mut slow {
        let ended = timeout(PATIENCE, async {
            let mut bytes = Vec::new();
            // A reset is an end too.
            let _ = client.read_to_end(&mut bytes).await;
        });
        ended.await?;
    }
    assert_eq!(daemon.status(&daemon.console, "/").await?, 200);
    Ok(())
}
