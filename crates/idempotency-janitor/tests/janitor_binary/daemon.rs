//! `run`, the daemon.

use std::process::Command;

use rig::database::{options, records};
use sqlx::PgPool;

use crate::support::{Process, command_at, command_on, expired, text};

/// What the daemon writes to its log until it has swept, under this `RUST_LOG`.
async fn log_of_a_sweep(pool: &PgPool, level: Option<&str>) -> anyhow::Result<String> {
    expired(pool, 3).await?;
    let mut command = command_at(&options(pool).password("hunter2"));
    if let Some(level) = level {
        command.env("RUST_LOG", level);
    }
    command.args(["run", "--interval", "1s"]).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
    let daemon = command.spawn()?;
    let started = std::time::Instant::now();
    while records(pool).await > 0 {
        assert!(started.elapsed().as_secs() < 30, "it sweeps");
    }
    assert!(Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status()?.success());
    let output = tokio::task::spawn_blocking(move || daemon.wait_with_output()).await??;
    assert_eq!(output.status.code(), Some(0));
    Ok(text(&output.stderr))
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_log_is_as_rust_log_says(pool: PgPool) -> anyhow::Result<()> {
    for usual in [None, Some(""), Some("info"), Some("sqlx=warn,pg_idempotency=info")] {
        let log = log_of_a_sweep(&pool, usual).await?;
        assert!(log.contains("INFO") && log.contains("swept") && !log.contains("DEBUG"), "{usual:?}: {log}");
    }
    let log = log_of_a_sweep(&pool, Some("warn")).await?;
    assert!(!log.contains("INFO"), "{log}");
    let log = log_of_a_sweep(&pool, Some("trace")).await?;
    assert!(log.contains("DEBUG") && log.contains("delete from idempotency.record"), "{log}");
    assert!(!log.contains("hunter2"), "{log}");
    let log = log_of_a_sweep(&pool, Some("=no=level=")).await?;
    assert!(log.contains("swept") && log.contains("invalid filter"), "a mistake does not stop it: {log}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn run_sweeps_until_sigterm_and_exits_with_success(pool: PgPool) -> anyhow::Result<()> {
    for signal in ["-TERM", "-INT"] {
        expired(&pool, 20).await?;
        let daemon = command_on(&pool)
            .args(["run", "--interval", "1s"])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()?;
        let started = std::time::Instant::now();
        while records(&pool).await > 0 {
            assert!(started.elapsed().as_secs() < 30, "it sweeps");
        }
        assert!(Command::new("kill").args([signal, &daemon.id().to_string()]).status()?.success());
        let output = tokio::task::spawn_blocking(move || daemon.wait_with_output()).await??;
        assert_eq!(output.status.code(), Some(0), "{signal}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("swept"), "{}", text(&output.stderr));
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn run_serves_metrics_and_health(pool: PgPool) -> anyhow::Result<()> {
    expired(&pool, 20).await?;
    let mut command = command_on(&pool);
    command.args(["run", "--interval", "1s", "--metrics-addr", "127.0.0.1:0"]).stderr(std::process::Stdio::null());
    let daemon = Process::start(&mut command);
    let url = daemon.said.trim().strip_prefix("metrics on ").expect("its address").to_owned();
    let started = std::time::Instant::now();
    let text = loop {
        let text = reqwest::get(&url).await?.text().await?;
        // The gauge of states is set after the pass.
        if text.contains("idempotency_records") {
            break text;
        }
        assert!(started.elapsed().as_secs() < 30, "it sweeps\n{text}");
    };
    assert!(text.contains("idempotency_cleanup_rows_total{kind=\"completed\"} 20"), "{text}");
    let health = reqwest::get(url.replace("/metrics", "/healthz")).await?;
    assert_eq!(health.status(), 200);
    daemon.terminate();
    Ok(())
}
