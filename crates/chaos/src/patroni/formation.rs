//! Three nodes and etcd. The faults wait here until one node leads and the others follow.

use std::fs::File;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context as _, bail};
use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};
use tokio::time::{Instant, sleep};

use super::link::Link;
use super::node::Node;
use super::programs::Programs;
use super::rest;
use super::router::{Ports, Router};
use crate::cluster::{create_database, free_ports, on_port};
use crate::keeper::{Keeper, signal_all};

/// A node that is copied anew takes seconds, and beside builds on two cores minutes.
const PATIENCE: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(100);
/// The time-out of one request to the REST API.
const LIMIT: Duration = Duration::from_secs(5);
/// A switchover answers when it has happened.
const SWITCHOVER_LIMIT: Duration = Duration::from_secs(60);

const NAMES: [&str; 3] = ["node1", "node2", "node3"];

/// How the leader replicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replication {
    /// `synchronous_mode` and `synchronous_mode_strict`: no commit without a synchronous standby.
    Strict,
    Asynchronous,
}

/// A drop ends the Patronis of the nodes, then etcd. The keeper then ends the other processes.
pub(crate) struct Formation {
    pub(crate) router: Router,
    nodes: Vec<Node>,
    replication: Replication,
    programs: Programs,
    etcd: Child,
    _keeper: Keeper,
}

/// One node, as `GET /cluster` shows it.
#[derive(Debug, Deserialize)]
struct Member {
    name: String,
    role: String,
    state: String,
    timeline: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Members {
    members: Vec<Member>,
}

impl Formation {
    pub(crate) async fn start(programs: Programs, replication: Replication) -> anyhow::Result<Self> {
        let keeper = Keeper::start(programs.user())?;
        let [client, peer, rest @ ..] = free_ports::<8>()?;
        let directory = keeper.directory("etcd")?;
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let log = File::create(directory.join("log"))?;
        let etcd = programs
            .etcd()
            .args(["--name", "etcd", "--log-level", "error", "--initial-cluster"])
            .arg(format!("etcd={}", url(peer)))
            .args(["--listen-client-urls", &url(client), "--advertise-client-urls", &url(client)])
            .args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)])
            .arg("--data-dir")
            .arg(directory.join("data"))
            .current_dir(&directory)
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("etcd does not start")?;
        let mut nodes = Vec::new();
        for (name, ports) in NAMES.into_iter().zip(rest.chunks(2)) {
            let ports = Ports { sql: ports[0], rest: ports[1] };
            let directory = keeper.directory(name)?;
            nodes.push(Node::new(name, ports, Link::to(client).await?, directory, &programs, &shared(replication))?);
        }
        let router = Router::before(nodes.iter().map(|node| node.ports).collect()).await?;
        let formation = Self { router, nodes, replication, programs, etcd, _keeper: keeper };
        // The first node creates the database, and the others copy it.
        formation.nodes[0].start(&formation.programs)?;
        formation.until("the first node leads", async || formation.router.leader().is_some()).await?;
        for node in &formation.nodes[1..] {
            node.start(&formation.programs)?;
        }
        formation.is_whole().await?;
        Ok(formation)
    }

    /// The callers' way to the leader.
    pub(crate) fn options(&self) -> PgConnectOptions {
        self.router.options()
    }

    pub(crate) async fn create_database(&self, name: &str) -> anyhow::Result<PgConnectOptions> {
        create_database(&self.options(), name).await
    }

    pub(crate) fn leader(&self) -> anyhow::Result<&Node> {
        let leader = self.router.leader().context("no node leads")?;
        self.nodes.iter().find(|node| node.ports == leader).context("a leader that is no node")
    }

    fn followers(&self) -> anyhow::Result<Vec<&Node>> {
        let leader = self.leader()?;
        Ok(self.nodes.iter().filter(|node| node.ports != leader.ports).collect())
    }

    pub(crate) fn start_again(&self, node: &Node) -> anyhow::Result<()> {
        node.start(&self.programs)
    }

    /// `patronictl switchover`, to a node of Patroni's choice. Patroni refuses it while no standby is ready, so this
    /// repeats it.
    pub(crate) async fn switch_over(&self, from: &Node) -> anyhow::Result<()> {
        let body = json!({ "leader": from.name });
        self.until("Patroni switches over", async || {
            let answer =
                rest::request(from.ports.rest, Method::POST, "/switchover", Some(&body), SWITCHOVER_LIMIT).await;
            matches!(answer, Ok((200, _))) || self.router.leader().is_some_and(|leader| leader != from.ports)
        })
        .await
    }

    /// Waits until another node than this one leads.
    pub(crate) async fn leaves(&self, old: &Node) -> anyhow::Result<()> {
        let what = format!("another node than {} leads", old.name);
        self.until(&what, async || self.router.leader().is_some_and(|leader| leader != old.ports)).await
    }

    /// Waits until one node leads and both others stream from it. Under strict replication one of them is the
    /// synchronous standby.
    pub(crate) async fn is_whole(&self) -> anyhow::Result<()> {
        self.until("one node leads and two follow", async || {
            let Ok(leader) = self.leader() else { return false };
            self.members(leader).await.is_ok_and(|members| self.agree(leader, &members))
                && self.streams().await.unwrap_or(false)
        })
        .await
    }

    /// SIGSTOP to the process of each follower that receives the leader's WAL. Returns them.
    pub(crate) async fn stop_receivers(&self) -> anyhow::Result<Vec<u32>> {
        let mut receivers = Vec::new();
        for follower in self.followers()? {
            let mut conn = PgConnection::connect_with(&on_port(follower.ports.sql)).await?;
            let receiver: i32 = sqlx::query_scalar("select pid from pg_stat_wal_receiver").fetch_one(&mut conn).await?;
            conn.close().await?;
            receivers.push(u32::try_from(receiver)?);
        }
        signal_all("-STOP", &receivers)?;
        Ok(receivers)
    }

    /// Their servers restart, with the WAL that they had written.
    pub(crate) fn kill_receivers(&self, receivers: &[u32]) -> anyhow::Result<()> {
        signal_all("-KILL", receivers)
    }

    async fn members(&self, of: &Node) -> anyhow::Result<Vec<Member>> {
        let (_, body) = rest::request(of.ports.rest, Method::GET, "/cluster", None, LIMIT).await?;
        Ok(serde_json::from_str::<Members>(&body)?.members)
    }

    fn agree(&self, leader: &Node, members: &[Member]) -> bool {
        let synchronous = members.iter().filter(|member| member.role == "sync_standby").count();
        let wanted = usize::from(self.replication == Replication::Strict);
        members.len() == self.nodes.len()
            && members.iter().all(|member| ["running", "streaming"].contains(&member.state.as_str()))
            && members.iter().all(|member| member.timeline == members[0].timeline)
            && members.iter().any(|member| member.role == "leader" && member.name == leader.name)
            && synchronous == wanted
    }

    async fn streams(&self) -> sqlx::Result<bool> {
        let mut conn = PgConnection::connect_with(&self.options()).await?;
        let sql = "
            select count(*) filter (where state = 'streaming') = 2
                and (count(*) filter (where sync_state = 'sync') = 1) = $1
            from pg_stat_replication";
        let streams =
            sqlx::query_scalar(sql).bind(self.replication == Replication::Strict).fetch_one(&mut conn).await?;
        conn.close().await?;
        Ok(streams)
    }

    /// Polls until the condition holds, because the machine may be busy. The error has the ends of the logs.
    async fn until(&self, what: &str, happened: impl AsyncFn() -> bool) -> anyhow::Result<()> {
        let started = Instant::now();
        while !happened().await {
            if started.elapsed() > PATIENCE {
                bail!("not within {PATIENCE:?}: {what}\n{}", self.logs());
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }

    fn logs(&self) -> String {
        let end = |node: &Node| {
            let log = std::fs::read_to_string(node.log()).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            format!("{}:\n{}\n", node.name, lines[lines.len().saturating_sub(15)..].join("\n"))
        };
        self.nodes.iter().map(end).collect()
    }
}

impl Drop for Formation {
    fn drop(&mut self) {
        // If etcd ended first, each Patroni would demote its server.
        self.nodes.clear();
        let _ = self.etcd.kill();
        let _ = self.etcd.wait();
    }
}

/// The configuration that etcd keeps for all nodes. The times are shorter than Patroni's defaults (`ttl` 30,
/// `loop_wait` 10 and `retry_timeout` 10 seconds), so that a failover takes seconds. Patroni asks for a `ttl` of at
/// least `loop_wait` and twice `retry_timeout`.
fn shared(replication: Replication) -> Value {
    let strict = replication == Replication::Strict;
    json!({
        "ttl": 8,
        "loop_wait": 1,
        "retry_timeout": 3,
        // No standby is too far behind to lead. The suite counts what that loses.
        "maximum_lag_on_failover": 1_u64 << 40,
        "synchronous_mode": strict,
        "synchronous_mode_strict": strict,
        "postgresql": {
            "use_pg_rewind": true,
            "use_slots": true,
            "parameters": {
                "max_connections": 100,
                "shared_buffers": "32MB",
                "wal_keep_size": "512MB",
                "wal_log_hints": "on",
                // The log has none of the errors that callers provoke.
                "log_min_messages": "log",
                // In files of the data directory, because files of a killed server in /dev/shm would stay.
                "dynamic_shared_memory_type": "mmap",
                "jit": "off",
            },
        },
    })
}
