//! `/healthz`: whether the database answers, without a new connection for each time that somebody asks.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rig::proxy::Proxy;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::support::command_on;

/// The daemon, behind such a network. It sweeps once at its start, and not again.
struct Daemon {
    process: Child,
    healthz: String,
}

impl Daemon {
    fn start(network: &Proxy) -> anyhow::Result<Self> {
        let mut process = command_on(&network.options)
            .args(["run", "--interval", "1h", "--metrics-addr", "127.0.0.1:0"])
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

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn probes_share_one_connection_and_say_when_the_database_hangs(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let network = Proxy::before(&options).await?;
    let daemon = Daemon::start(&network)?;
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

/// As a restart of the server does.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_broken_connection_is_replaced_within_the_probe(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let network = Proxy::before(&options).await?;
    let daemon = Daemon::start(&network)?;
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
