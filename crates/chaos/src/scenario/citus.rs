//! Faults of a Citus cluster, under callers in all modes whose effects are beside the keys: nothing is lost, and nothing
//! happens twice. With effects in a plain table of the coordinator, the losses are counted.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use sqlx::AssertSqlSafe;
use tokio::time::{Instant, sleep};

use crate::callers::load::{Load, Way, calls_of};
use crate::callers::modes::{Answers, Loads};
use crate::callers::outage::{Injected, Seen, seen};
use crate::checker::{lost, violations};
use crate::citus::effects::Effects;
use crate::citus::nodes::{Node, Nodes};
use crate::history::now;
use crate::proxy::{PAST_ALL_HOLES, Proxy, Trouble};
use crate::stage::{Finding, Stage};
use crate::world::World;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    KilledWorker,
    KilledCoordinator,
    /// Between the coordinator and the workers.
    CutConnections,
    MovedShards,
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::KilledWorker => "worker killed -9",
            Self::KilledCoordinator => "coordinator killed -9",
            Self::CutConnections => "connections to the workers cut",
            Self::MovedShards => "shards moved",
        }
    }
}

/// Faults of one kind, at least.
const LEAST: usize = 4;
/// Answers between two faults.
const BETWEEN: u64 = 100;
/// For how long a node that was killed is away.
const AWAY: Duration = Duration::from_millis(500);
/// No caller is connected past the proxies.
const NOBODY: &str = "nobody";

const CUTS: Trouble = Trouble { commits: 8, messages: 200, latency: 0..0 };
/// Answers while connections are cut, which takes one COMMIT in eight.
const WHILE_CUT: u64 = 100;

/// How Citus moves a shard.
const WAYS: [(&str, &str); 2] = [
    ("block_writes", "shard moved, its writes blocked"),
    // The table of effects has no key, so its rows cannot be updated meanwhile. Nobody updates them.
    ("force_logical", "shard moved by logical replication"),
];

pub(crate) async fn play(stage: &Stage, fault: Fault) -> anyhow::Result<Finding> {
    let script = match Nodes::find() {
        Ok(script) => script,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let nodes = Nodes::start(script).await?;
    let proxies = RefCell::new(Vec::new());
    let mut loads = Loads::start(async |name| {
        let options = nodes.create_database(name).await?;
        let world = World::distributed(options, stage, name, Effects::BesideTheKeys).await?;
        if fault == Fault::CutConnections {
            for worker in Node::WORKERS {
                let proxy = Proxy::before_port(&world, CUTS, nodes.port(worker)).await?;
                let sql = "select citus_update_node(nodeid, nodename, $2) from pg_dist_node where nodeport = $1";
                let ports = [nodes.port(worker), proxy.options.get_port()].map(i32::from);
                sqlx::query(sql).bind(ports[0]).bind(ports[1]).execute(&world.observer).await?;
                proxies.borrow_mut().push(proxy);
            }
        }
        Ok(world)
    })
    .await?;
    let proxies = proxies.into_inner();
    let (until, mut injected) = (Instant::now() + stage.time, Vec::new());
    let mut ended = Ok(());
    while ended.is_ok() && (injected.len() < LEAST || Instant::now() < until) {
        let at = now();
        ended = fault.inject(&nodes, &loads, &proxies, injected.len()).await;
        injected.push(Injected { kind: fault.name(), at, over: now() });
    }
    loads.stop().await?;
    if fault == Fault::CutConnections {
        sleep(PAST_ALL_HOLES).await;
    }
    let (mut finding, lost) = loads.check(Answers::AllTrue).await?;
    // What was lost is worth knowing also where the cluster did not recover.
    if let Err(error) = ended {
        finding.violations.push(format!("not all faults were injected and survived: {error:#}"));
    }
    let seen = seen(&calls_of(&loads.all()), &injected, &lost, NOBODY);
    finding.longest_outage = seen.iter().map(Seen::longest).max().unwrap_or_default();
    Ok(seen.iter().fold(finding, Finding::note))
}

impl Fault {
    /// Returns when the callers get answers again.
    async fn inject(self, nodes: &Nodes, loads: &Loads, proxies: &[Proxy], round: usize) -> anyhow::Result<()> {
        let (load, world) = (&loads.transactions, &loads.transactions.world);
        match self {
            Self::KilledWorker => kill(nodes, Node::WORKERS[round % 2]).await?,
            Self::KilledCoordinator => kill(nodes, Node::Coordinator).await?,
            Self::CutConnections => {
                proxies.iter().for_each(|proxy| proxy.cut(true));
                load.goes_on(WHILE_CUT).await?;
                proxies.iter().for_each(|proxy| proxy.cut(false));
                // Each cut is counted by its world.
                return load.goes_on(BETWEEN).await;
            }
            Self::MovedShards => {
                let (way, fault) = WAYS[round % 2];
                for load in loads.all() {
                    move_shard(nodes, &load.world, way).await?;
                    load.world.fault(fault);
                }
                return load.goes_on(BETWEEN).await;
            }
        }
        world.fault(self.name());
        load.goes_on(BETWEEN).await
    }
}

async fn kill(nodes: &Nodes, node: Node) -> anyhow::Result<()> {
    nodes.kill(node).await?;
    sleep(AWAY).await;
    nodes.start_again(node).await
}

/// One of the shards of the records, with the effects beside them, to the other worker.
async fn move_shard(nodes: &Nodes, world: &World, way: &str) -> anyhow::Result<()> {
    let (shard, from): (i64, i32) = sqlx::query_as(
        "select shardid, nodeport from citus_shards where table_name = 'idempotency.record'::regclass
        order by random() limit 1",
    )
    .fetch_one(&world.observer)
    .await?;
    let [from, to] = match Node::WORKERS.map(|worker| nodes.port(worker)) {
        [first, second] if i32::from(first) == from => [first, second],
        [first, second] => [second, first],
    };
    let sql = format!(
        "select citus_move_shard_placement({shard}, '127.0.0.1', {from}, '127.0.0.1', {to}, shard_transfer_mode => '{way}')"
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.observer).await?;
    Ok(())
}

/// The same kills for two tables of effects on the coordinator: one that Citus knows, and one that it does not know.
/// Where it does not, the key commits on its worker before the effect does.
pub(crate) async fn play_local_table(stage: &Stage) -> anyhow::Result<Finding> {
    let script = match Nodes::find() {
        Ok(script) => script,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let nodes = Nodes::start(script).await?;
    let load = async |name: &str, effects| {
        let world = World::distributed(nodes.create_database(name).await?, stage, name, effects).await?;
        anyhow::Ok(Load::start(&world, Way::Transaction, name, 6))
    };
    let mut known = load("known", Effects::LocalToCitus).await?;
    let mut plain = load("plain", Effects::Plain).await?;
    let until = Instant::now() + stage.time;
    let mut kills = 0;
    while kills < LEAST || Instant::now() < until {
        kill(&nodes, Node::Coordinator).await?;
        kills += 1;
        plain.world.fault(Fault::KilledCoordinator.name());
        known.goes_on(BETWEEN).await?;
        plain.goes_on(BETWEEN).await?;
    }
    let mut finding = Finding::default();
    let mut found = 0;
    for (name, load, promised) in [("known to Citus", &mut known, true), ("plain", &mut plain, false)] {
        load.stop().await?;
        let world = load.world.clone();
        sqlx::query("select recover_prepared_transactions()").execute(&world.observer).await?;
        let before = world.history.calls();
        let given = before.iter().filter(|call| call.response().is_some()).count();
        load.settle().await?;
        let after = world.aftermath().await?;
        let said = violations(&world.history.calls(), &after);
        let counted = format!(
            "{name}: {} records without their effect, {} of {given} answers lost",
            said.iter().filter(|said| said.contains("without its effect")).count(),
            lost(&before, &after),
        );
        if promised {
            finding.add(Finding::with(&world, said));
        } else {
            found = said.len();
            finding.add(Finding::with(&world, Vec::new()));
        }
        finding = finding.note(counted);
    }
    ensure!(found > 0, "the plain table has lost nothing in {kills} kills, so nobody knows whether the audit sees it");
    Ok(finding.note(format!("the audit finds {found} violations with the plain table, as it must")))
}
