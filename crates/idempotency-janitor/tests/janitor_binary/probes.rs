//! `/healthz`: whether the database answers, without a new connection for each time that somebody asks.

use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rig::proxy::Proxy;
use sqlx::PgPool;

use crate::support::{Process, command_at, command_on};

/// The daemon, behind such a network. It sweeps once at its start, and not again.
struct Daemon {
    _process: Process,
    healthz: String,
}

impl Daemon {
    fn start(network: &Proxy) -> Self {
        let mut command = command_at(&network.options);
        command.args(["run", "--interval", "1h", "--metrics-addr", "127.0.0.1:0"]).stderr(Stdio::null());
        let process = Process::start(&mut command);
        let metrics = process.said.trim().strip_prefix("metrics on ").expect("its address");
        Self { healthz: metrics.replace("/metrics", "/healthz"), _process: process }
    }

    async fn probe(&self) -> anyhow::Result<(u16, Duration)> {
        let started = Instant::now();
        let status = reqwest::get(&self.healthz).await?.status().as_u16();
        Ok((status, started.elapsed()))
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn probes_share_one_connection_and_say_when_the_database_hangs(pool: PgPool) -> anyhow::Result<()> {
    let network = Proxy::before(&pool.connect_options()).await?;
    let daemon = Daemon::start(&network);
    for _ in 0..20 {
        assert_eq!(daemon.probe().await?.0, 200);
    }
    let opened = network.connections();
    assert!(opened <= 2, "one to sweep and one to probe, not {opened}");

    network.vanish();
    for _ in 0..2 {
        let (status, took) = daemon.probe().await?;
        assert_eq!(status, 503);
        assert!(took < Duration::from_secs(4), "in time: {took:?}");
    }
    network.mend();
    assert_eq!(daemon.probe().await?.0, 200, "as soon as it answers");
    Ok(())
}

/// On loopback, a page of another site could read the names of the operations, if its own name led to this machine.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn metrics_on_loopback_are_for_no_other_name_of_the_host(pool: PgPool) -> anyhow::Result<()> {
    let mut command = command_on(&pool);
    command.args(["run", "--interval", "1h", "--metrics-addr", "127.0.0.1:0"]).stderr(Stdio::null());
    let process = Process::start(&mut command);
    let url = process.said.trim().strip_prefix("metrics on http://").expect("its address").to_owned();
    let address = url.trim_end_matches("/metrics").to_owned();
    for path in ["/metrics", "/healthz"] {
        for (host, status) in [
            (Some("127.0.0.1"), "200"),
            (Some("localhost:9"), "200"),
            (Some("[::1]:9"), "200"),
            (None, "200"),
            (Some("evil.example"), "403"),
            (Some("127.0.0.1.evil.example:9"), "403"),
            (Some(""), "403"),
        ] {
            let mut stream = std::net::TcpStream::connect(&address)?;
            let host_line = host.map(|host| format!("host: {host}\r\n")).unwrap_or_default();
            stream.write_all(format!("GET {path} HTTP/1.0\r\n{host_line}\r\n").as_bytes())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            assert_eq!(answer.split(' ').nth(1), Some(status), "{path} {host:?}: {answer}");
        }
    }
    Ok(())
}

/// As a restart of the server does.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_broken_connection_is_replaced_within_the_probe(pool: PgPool) -> anyhow::Result<()> {
    let network = Proxy::before(&pool.connect_options()).await?;
    let daemon = Daemon::start(&network);
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
