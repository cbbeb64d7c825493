//! One node: a Patroni and the PostgreSQL that it runs.

use std::fs::File;
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::link::Link;
use super::programs::Programs;
use super::router::Ports;
use crate::keeper::{bury, processes_within, signal_all};

/// A killed process is gone as soon as its parent has reaped it.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Node {
    pub(crate) name: &'static str,
    pub(crate) ports: Ports,
    pub(crate) link: Link,
    directory: PathBuf,
    patroni: Mutex<Option<Child>>,
}

impl Node {
    pub(crate) fn new(
        name: &'static str,
        ports: Ports,
        link: Link,
        directory: PathBuf,
        programs: &Programs,
        shared: &Value,
    ) -> anyhow::Result<Self> {
        let node = Self { name, ports, link, directory, patroni: Mutex::default() };
        std::fs::write(node.directory.join("patroni.json"), node.configuration(programs, shared).to_string())?;
        Ok(node)
    }

    /// Patroni reads YAML, and JSON is YAML. `shared` is what etcd keeps for the whole cluster.
    fn configuration(&self, programs: &Programs, shared: &Value) -> Value {
        let sql = format!("127.0.0.1:{}", self.ports.sql);
        let rest = format!("127.0.0.1:{}", self.ports.rest);
        let trust =
            ["local all all trust", "host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"];
        json!({
            "scope": "chaos",
            "name": self.name,
            "restapi": { "listen": rest, "connect_address": rest },
            // Only this address. Otherwise Patroni would learn etcd's own from etcd, and bypass the link.
            "etcd": { "hosts": [format!("127.0.0.1:{}", self.link.port())], "use_proxies": true },
            "bootstrap": {
                "dcs": shared,
                "initdb": [{ "auth": "trust" }, { "encoding": "UTF8" }, { "locale": "C" }],
            },
            "postgresql": {
                "listen": sql,
                "connect_address": sql,
                "data_dir": self.directory.join("data"),
                "bin_dir": programs.bindir,
                "pgpass": self.directory.join("pgpass"),
                "authentication": {
                    "superuser": { "username": "postgres", "password": "postgres" },
                    "replication": { "username": "replicator", "password": "replicator" },
                },
                "parameters": { "unix_socket_directories": self.directory },
                "pg_hba": trust,
                "basebackup": [{ "checkpoint": "fast" }],
                "use_unix_socket": true,
                "remove_data_directory_on_rewind_failure": true,
                "remove_data_directory_on_diverged_timelines": true,
            },
        })
    }

    /// Starts Patroni, which starts PostgreSQL.
    pub(crate) fn start(&self, programs: &Programs) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let patroni = programs
            .patroni()
            .arg(self.directory.join("patroni.json"))
            .current_dir(&self.directory)
            .env("HOME", &self.directory)
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("Patroni does not start")?;
        *self.patroni.lock().unwrap_or_else(PoisonError::into_inner) = Some(patroni);
        Ok(())
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// SIGKILL to Patroni and to every process of its PostgreSQL: the machine is gone.
    pub(crate) async fn kill(&self) -> anyhow::Result<()> {
        let patroni = self.patroni.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Some may be gone before their turn, and others may just have been started.
        let _ = signal_all("-KILL", &self.processes());
        if let Some(mut patroni) = patroni {
            patroni.kill()?;
            patroni.wait()?;
        }
        let started = Instant::now();
        loop {
            let left = self.processes();
            if left.is_empty() {
                return bury(&self.directory.join("data/postmaster.pid"));
            }
            ensure!(started.elapsed() < PATIENCE, "processes of {} do not die: {left:?}", self.name);
            let _ = signal_all("-KILL", &left);
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// SIGSTOP to every process of the node: a virtual machine that is suspended.
    pub(crate) fn pause(&self) {
        // A second time, for processes that were started meanwhile.
        for _ in 0..2 {
            let _ = signal_all("-STOP", &self.processes());
        }
    }

    pub(crate) fn wake(&self) {
        let _ = signal_all("-CONT", &self.processes());
    }

    fn processes(&self) -> Vec<u32> {
        processes_within(&self.directory)
    }
}

impl Drop for Node {
    /// The keeper ends its PostgreSQL.
    fn drop(&mut self) {
        let patroni = self.patroni.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut patroni) = patroni {
            let _ = patroni.kill();
            let _ = patroni.wait();
        }
    }
}
