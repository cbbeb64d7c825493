//! `pgbench` with the same statements: what the server can do with a client that costs next to nothing.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use tokio::process::Command;

use crate::measure::Sample;
use crate::setting::Setting;

/// A directory for the script and the log, gone with the sample.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) async fn sample(
    program: &Path,
    script: &str,
    setting: &Setting,
    clients: usize,
    calls_of_each: f64,
) -> anyhow::Result<Sample> {
    let scratch = Scratch(std::env::temp_dir().join(format!("pgi-pgbench.{}", std::process::id())));
    std::fs::create_dir_all(&scratch.0)?;
    let file = scratch.0.join("script.sql");
    std::fs::write(&file, script)?;
    let server = &setting.server;
    let host =
        server.get_socket().map_or_else(|| server.get_host().into(), |directory| directory.as_os_str().to_owned());
    let output = Command::new(program)
        .args(["--no-vacuum", "--protocol=prepared", "--jobs=2", "--log", "--log-prefix=log"])
        .arg(format!("--client={clients}"))
        .arg(format!("--transactions={}", (calls_of_each as u64).max(5)))
        .arg("--file")
        .arg(&file)
        .current_dir(&scratch.0)
        .env("PGHOST", host)
        .env("PGPORT", server.get_port().to_string())
        .env("PGUSER", server.get_username())
        .env("PGDATABASE", server.get_database().unwrap_or("postgres"))
        .env("PGOPTIONS", format!("-c synchronous_commit={}", if setting.synchronous { "on" } else { "off" }))
        .output()
        .await?;
    ensure!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
    let told = String::from_utf8(output.stdout)?;
    let rate = told
        .lines()
        .filter(|line| line.contains("without initial connection time") || line.contains("excluding connections"))
        .find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok())
        .with_context(|| told.clone())?;
    Ok(Sample { rate, latencies: latencies(&scratch.0)? })
}

/// The third column of its log, in microseconds.
fn latencies(directory: &Path) -> anyhow::Result<Vec<f64>> {
    let mut latencies = Vec::new();
    for file in std::fs::read_dir(directory)? {
        let file = file?;
        if file.file_name().to_string_lossy().starts_with("log.") {
            let log = std::fs::read_to_string(file.path())?;
            latencies
                .extend(log.lines().filter_map(|line| line.split(' ').nth(2)?.parse::<f64>().ok()).map(|us| us / 1e3));
        }
    }
    Ok(latencies)
}
