//! Faults of a Citus cluster, under callers in all modes whose effects are beside the keys: nothing is lost, and nothing
//! happens twice. With effects in a plain table of the coordinator, the losses are counted.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::join_all;
use sqlx::AssertSqlSafe;
use tokio::time::{Instant, sleep, timeout};

use crate::beside::InSteps;
use crate::callers::load::calls_of;
use crate::callers::modes::{Answers, Loads};
use crate::callers::outage::{Injected, Seen, seen};
use crate::checker::{lost, violations};
use crate::citus::effects::Effects;
use crate::citus::nodes::{Node, Nodes};
use crate::history::{longest_outage, now};
use crate::proxy::{PAST_ALL_HOLES, Proxy, Trouble};
use crate::stage::{Finding, Stage};
use crate::subject::{SAFE_TO_DROP, Subject};
use crate::world::{Least, World, pool_that_waits};

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

/// Of a scenario, beyond its time: a cluster that starts, faults that take long, and callers that get their answers.
const LIMIT: Duration = Duration::from_secs(600);
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

/// Of each of the two tables on the coordinator.
const CLIENTS: u32 = 8;
/// Short, for the callers to be back before the next kill.
const WAIT: Duration = Duration::from_millis(250);
/// Connections are cut for this long, and then for this long they are not.
const CUT_FOR: Duration = Duration::from_millis(1500);
const LEAST_ON_LOCAL_TABLES: Least = &[("coordinator killed -9", 2), ("cut after COMMIT was answered", 2)];

/// How Citus moves a shard.
const WAYS: [(&str, &str); 2] = [
    ("block_writes", "shard moved, its writes blocked"),
    // The table of effects has no key, so its rows cannot be updated meanwhile. Nobody updates them.
    ("force_logical", "shard moved by logical replication"),
];

/// With the effects beside the keys.
pub(crate) async fn play(stage: &Stage, fault: Fault) -> anyhow::Result<Finding> {
    on_nodes(stage, async |nodes| play_fault(stage, nodes, fault).await).await
}

/// With the effects in tables of the coordinator.
pub(crate) async fn play_local_tables(stage: &Stage) -> anyhow::Result<Finding> {
    on_nodes(stage, async |nodes| cut_and_kill(stage, nodes).await).await
}

/// In bounded time, and the cluster is gone after it.
async fn on_nodes(stage: &Stage, play: impl AsyncFnOnce(&Nodes) -> anyhow::Result<Finding>) -> anyhow::Result<Finding> {
    let script = match Nodes::find() {
        Ok(script) => script,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let played = async { play(&Nodes::start(script).await?).await };
    timeout(stage.time + LIMIT, played).await.context("it takes too long")?
}

async fn play_fault(stage: &Stage, nodes: &Nodes, fault: Fault) -> anyhow::Result<Finding> {
    let proxies = RefCell::new(Vec::new());
    let mut loads = Loads::start(async |name| {
        let options = nodes.create_database(name).await?;
        let world = World::distributed(options, stage, name, &[], Effects::BesideTheKeys).await?;
        if fault == Fault::CutConnections {
            let mut more = before_workers(nodes, &world).await?;
            proxies.borrow_mut().append(&mut more);
        }
        Ok(world)
    })
    .await?;
    // A mutant is of the other calls; and behind the proxies Citus distributes no more tables.
    let steps = if stage.subject == Subject::Crate && fault != Fault::CutConnections {
        let world = async |stage: &Stage| {
            let options = nodes.create_database("steps").await?;
            World::distributed(options, stage, "steps", &[], Effects::BesideTheKeys).await
        };
        Some(InSteps::on(stage, world).await?)
    } else {
        None
    };
    let proxies = proxies.into_inner();
    let (until, mut injected) = (Instant::now() + stage.time, Vec::new());
    let mut ended = Ok(());
    while ended.is_ok() && (injected.len() < LEAST || Instant::now() < until) {
        let at = now();
        ended = fault.inject(nodes, &loads, &proxies, injected.len()).await;
        injected.push(Injected { kind: fault.name(), at, over: now() });
    }
    loads.stop().await?;
    if fault == Fault::CutConnections {
        sleep(PAST_ALL_HOLES).await;
    }
    let (mut finding, lost) = loads.check(Answers::AllTrue).await?;
    if let Some(steps) = steps {
        finding.add(steps.finding().await?);
    }
    // What was lost is worth knowing also where the cluster did not recover.
    if let Err(error) = ended {
        finding.violations.push(format!("not all faults were injected and survived: {error:#}"));
    }
    let calls = calls_of(&loads.all());
    let seen = seen(&calls, &injected, &lost, NOBODY);
    let of_one = seen.iter().map(Seen::longest).max().unwrap_or_default();
    finding.longest_outage = of_one.max(longest_outage(&calls));
    Ok(seen.iter().fold(finding, Finding::note))
}

impl Fault {
    /// Returns when the callers get answers again.
    async fn inject(self, nodes: &Nodes, loads: &Loads, proxies: &[Proxy], round: usize) -> anyhow::Result<()> {
        let (load, world) = (&loads.transactions, &loads.transactions.world);
        match self {
            Self::KilledWorker => kill(nodes, Node::WORKERS[round % 2], round / 2).await?,
            Self::KilledCoordinator => kill(nodes, Node::Coordinator, round).await?,
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

/// The postmaster alone, or the whole node.
async fn kill(nodes: &Nodes, node: Node, round: usize) -> anyhow::Result<()> {
    if round.is_multiple_of(2) {
        nodes.kill(node).await?
    } else {
        nodes.kill_all(node).await?
    }
    sleep(AWAY).await;
    nodes.start_again(node).await
}

/// The coordinator then reaches the workers through them.
async fn before_workers(nodes: &Nodes, world: &Arc<World>) -> anyhow::Result<Vec<Proxy>> {
    let mut proxies = Vec::new();
    for worker in Node::WORKERS.map(|worker| nodes.port(worker)) {
        let proxy = Proxy::before_port(world, CUTS, worker).await?;
        let sql = "select citus_update_node(nodeid, nodename, $2) from pg_dist_node where nodeport = $1";
        let moved = sqlx::query(sql).bind(i32::from(worker)).bind(i32::from(proxy.options.get_port()));
        moved.execute(&world.observer).await?;
        proxies.push(proxy);
    }
    Ok(proxies)
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

/// The same faults for two tables of effects on the coordinator: one that Citus knows, so that it commits in two phases,
/// and one that it does not know. With that one, the record commits on its worker, and then the effect.
async fn cut_and_kill(stage: &Stage, nodes: &Nodes) -> anyhow::Result<Finding> {
    let (mut crowds, mut proxies) = (Vec::new(), Vec::new());
    for (name, effects) in [("known-to-citus", Effects::LocalToCitus), ("plain", Effects::Plain)] {
        let options = nodes.create_database(name).await?;
        let world = World::distributed(options, stage, name, LEAST_ON_LOCAL_TABLES, effects).await?;
        proxies.extend(before_workers(nodes, &world).await?);
        let pool = pool_that_waits(&world.options, CLIENTS, WAIT);
        let clients = world.crowd(&pool, CLIENTS.into(), |random, request| request.door = random.of(SAFE_TO_DROP));
        crowds.push((world, clients));
    }
    for round in 1.. {
        proxies.iter().for_each(|proxy| proxy.cut(true));
        sleep(CUT_FOR).await;
        proxies.iter().for_each(|proxy| proxy.cut(false));
        kill(nodes, Node::Coordinator, round).await?;
        crowds.iter().for_each(|(world, _)| world.fault(Fault::KilledCoordinator.name()));
        sleep(CUT_FOR).await;
        if crowds.iter().all(|(world, _)| world.is_over()) {
            break;
        }
    }
    let mut finding = Finding::default();
    for (world, clients) in crowds {
        join_all(clients).await.into_iter().collect::<Result<(), _>>()?;
        // Citus does so each minute.
        sqlx::query("select recover_prepared_transactions()").execute(&world.observer).await?;
        let before = world.history.calls();
        let given = before.iter().filter(|call| call.response().is_some()).count();
        world.settle().await?;
        let after = world.aftermath().await?;
        let said = violations(&world.history.calls(), &after);
        let without_effect = said.iter().filter(|said| said.contains("without its effect")).count();
        let name = world.options.get_database().unwrap_or_default();
        let (found, lost) = (said.len(), lost(&before, &after));
        let note = format!(
            "{name}: {without_effect} records without their effect, {lost} of {given} answers lost, {found} violations"
        );
        let is_plain = name == "plain";
        finding.add(Finding::with(&world, if is_plain { Vec::new() } else { said }));
        finding = finding.note(note);
        if is_plain && found == 0 {
            finding.violations.push("the audit does not see what the plain table loses".to_owned());
        }
    }
    Ok(finding)
}
