//! A Citus cluster of the suite's own: a coordinator and two workers on 127.0.0.1. The script `cluster` in the
//! directory that `CITUS_CLUSTER` names starts them, kills them and starts them again.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures_util::future::try_join_all;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::{free_ports, on_port, signal};
use crate::keeper::{Keeper, User, bury, processes_within, signal_all};

/// Names the directory with the script, which script/citus uses too.
const VARIABLE: &str = "CITUS_CLUSTER";
/// For one command of the script. Three servers start in seconds, and beside builds in more.
const PATIENCE: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Coordinator,
    Worker1,
    Worker2,
}

impl Node {
    const ALL: [Self; 3] = [Self::Coordinator, Self::Worker1, Self::Worker2];
    pub(crate) const WORKERS: [Self; 2] = [Self::Worker1, Self::Worker2];

    /// The script's name for the node.
    fn name(self) -> &'static str {
        match self {
            Self::Coordinator => "c",
            Self::Worker1 => "w1",
            Self::Worker2 => "w2",
        }
    }
}

pub(crate) struct Nodes {
    script: PathBuf,
    directory: PathBuf,
    ports: [u16; 3],
    /// Ends the servers, and removes the directory.
    _keeper: Keeper,
}

impl Nodes {
    /// The script, or the reason if there is none.
    pub(crate) fn find() -> Result<PathBuf, String> {
        if !Path::new("/proc/self/cwd").exists() {
            return Err("there is no /proc here, which finds the processes of a node".to_owned());
        }
        let directory = std::env::var_os(VARIABLE);
        let directory = directory.ok_or_else(|| format!("{VARIABLE} names no directory with a script `cluster`"))?;
        let script = Path::new(&directory).join("cluster");
        script.canonicalize().map_err(|error| format!("{VARIABLE}: {}: {error}", script.display()))
    }

    pub(crate) async fn start(script: PathBuf) -> anyhow::Result<Self> {
        let keeper = Keeper::start(User::of_servers())?;
        let nodes = Self { script, directory: keeper.directory("citus")?, ports: free_ports()?, _keeper: keeper };
        nodes.run("start", &nodes.ports[0].to_string()).await?;
        for setting in [
            // An asynchronous commit is written late, so that a mistake shows.
            "wal_writer_delay = '10s'",
            // Shards can then move without blocking writes.
            "wal_level = logical",
            // In files of the data directory, which are removed with it.
            "dynamic_shared_memory_type = mmap",
            "log_min_messages = fatal",
            // Otherwise a transaction is in doubt for a minute.
            "citus.recover_2pc_interval = '1s'",
        ] {
            nodes.everywhere("postgres", &format!("alter system set {setting}")).await?;
        }
        try_join_all(Node::ALL.map(async |node| nodes.restart(node).await)).await?;
        Ok(nodes)
    }

    pub(crate) fn port(&self, node: Node) -> u16 {
        self.ports[node as usize]
    }

    /// Runs a command of the script for this node, or with this port.
    async fn run(&self, command: &str, argument: &str) -> anyhow::Result<()> {
        let output = Command::new(&self.script)
            .arg(command)
            .arg(&self.directory)
            .arg(argument)
            // The keeper then finds the processes, and Ctrl-C does not reach them before.
            .current_dir(&self.directory)
            .process_group(0)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = timeout(PATIENCE, output).await.with_context(|| format!("cluster {command} does not end"))??;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cluster {command} {argument}: {}: {said}", output.status);
        Ok(())
    }

    /// SIGKILL to the postmaster, whose backends end when they notice.
    pub(crate) async fn kill(&self, node: Node) -> anyhow::Result<()> {
        self.run("kill", node.name()).await
    }

    /// SIGKILL to the postmaster and then to every backend: the machine is gone.
    pub(crate) async fn kill_all(&self, node: Node) -> anyhow::Result<()> {
        self.kill(node).await?;
        // Some may be gone before their turn.
        let _ = signal_all("-KILL", &processes_within(&self.directory.join(node.name())));
        Ok(())
    }

    /// Starts a node that was killed, and waits until it answers.
    pub(crate) async fn start_again(&self, node: Node) -> anyhow::Result<()> {
        let directory = self.directory.join(node.name());
        let started = Instant::now();
        // The orphans of the postmaster.
        while !processes_within(&directory).is_empty() {
            ensure!(started.elapsed() < PATIENCE, "processes of {} do not end", node.name());
            sleep(PAUSE).await;
        }
        bury(&directory.join("postmaster.pid"))?;
        self.run("up", node.name()).await
    }

    async fn restart(&self, node: Node) -> anyhow::Result<()> {
        let file = self.directory.join(node.name()).join("postmaster.pid");
        let text = std::fs::read_to_string(&file)?;
        signal("-INT", text.lines().next().context("an empty postmaster.pid")?.parse()?)?;
        let started = Instant::now();
        while file.exists() {
            ensure!(started.elapsed() < PATIENCE, "{} does not stop", node.name());
            sleep(PAUSE).await;
        }
        self.run("up", node.name()).await
    }

    pub(crate) fn options(&self, node: Node, database: &str) -> PgConnectOptions {
        on_port(self.port(node)).database(database)
    }

    /// Runs a statement on each node, in the database of this name.
    async fn everywhere(&self, database: &str, sql: &str) -> anyhow::Result<()> {
        let run = async |node| {
            let mut conn = PgConnection::connect_with(&self.options(node, database)).await?;
            conn.execute(AssertSqlSafe(sql)).await?;
            anyhow::Ok(conn.close().await?)
        };
        try_join_all(Node::ALL.map(run)).await.map(drop)
    }

    /// Creates a database with Citus and the nodes, for one world.
    pub(crate) async fn create_database(&self, name: &str) -> anyhow::Result<PgConnectOptions> {
        self.everywhere("postgres", &format!("create database \"{name}\"")).await?;
        self.everywhere(name, "create extension citus").await?;
        let options = self.options(Node::Coordinator, name);
        let mut conn = PgConnection::connect_with(&options).await?;
        let [coordinator, workers @ ..] = Node::ALL.map(|node| self.port(node));
        conn.execute(AssertSqlSafe(format!("select citus_set_coordinator_host('127.0.0.1', {coordinator})"))).await?;
        for worker in workers {
            conn.execute(AssertSqlSafe(format!("select citus_add_node('127.0.0.1', {worker})"))).await?;
        }
        conn.close().await?;
        Ok(options)
    }
}

/// Few, and both workers still have some.
const SHARDS: &str = "set citus.shard_count = 4";

/// The place of the table of effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effects {
    /// Distributed by the scope, so that a call is one transaction on one worker.
    BesideTheKeys,
    /// In a table of the coordinator that Citus knows.
    LocalToCitus,
    /// In a plain table of the coordinator, which Citus does not know.
    Plain,
}

impl Effects {
    pub(crate) async fn distribute(self, options: &PgConnectOptions) -> anyhow::Result<()> {
        // One connection, so that all statements see the setting.
        let pool = PgPoolOptions::new().max_connections(1).connect_with(options.clone()).await?;
        pool.execute(SHARDS).await?;
        pg_idempotency::distribute(&pool).await?;
        let place = match self {
            Self::BesideTheKeys => {
                "select create_distributed_table(name, 'key', colocate_with => 'idempotency.record')
                from unnest(array['effect', 'part']) as name"
            }
            Self::LocalToCitus => "select citus_add_local_table_to_metadata('effect')",
            Self::Plain => return Ok(()),
        };
        pool.execute(place).await?;
        Ok(())
    }
}
