//! Faults of a Citus cluster, under callers in all modes. Only here do a record and its effect commit on a worker, or
//! in two phases. With the effects beside the keys nothing is lost, and nothing happens twice. With the effects in a
//! plain table of the coordinator, the losses are counted.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use sqlx::AssertSqlSafe;
use tokio::time::{Instant, sleep, timeout};

use crate::callers::loads::Loads;
use crate::callers::{Answers, Callers, Way};
use crate::citus::{Effects, Node, Nodes};
use crate::finding::Finding;
use crate::proxy::{PAST_ALL_HOLES, Proxy};
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
use crate::world::{Least, Setup, World, pool_that_waits};

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

/// How much longer than its time a scenario may take: the cluster starts, faults are slow, and every key is settled.
const LIMIT: Duration = Duration::from_secs(600);
/// The minimum number of faults.
const LEAST: usize = 4;
/// Answers between two faults.
const BETWEEN: u64 = 100;
/// How long a killed node is away.
const AWAY: Duration = Duration::from_millis(500);
/// Answers while connections are cut.
const WHILE_CUT: u64 = 100;

/// The callers of each of the two tables on the coordinator.
const CLIENTS: u32 = 8;
/// Short, for the callers to be back before the next kill.
const WAIT: Duration = Duration::from_millis(250);
/// How long connections are cut, and then not cut.
const CUT_FOR: Duration = Duration::from_millis(1500);
const LEAST_ON_LOCAL_TABLES: Least = &[("coordinator killed -9", 2), ("cut after COMMIT was answered", 2)];

/// How Citus moves a shard.
const WAYS: [(&str, &str); 2] = [
    ("block_writes", "shard moved, its writes blocked"),
    // The rows of a table without a key cannot be updated during the move. No caller updates the effects.
    ("force_logical", "shard moved by logical replication"),
];

/// With the effects beside the keys.
pub(super) async fn play(stage: &Stage, fault: Fault) -> anyhow::Result<Finding> {
    on_nodes(stage, async |nodes| play_fault(stage, nodes, fault).await).await
}

/// With the effects in tables of the coordinator.
pub(super) async fn play_local_tables(stage: &Stage) -> anyhow::Result<Finding> {
    on_nodes(stage, async |nodes| cut_and_kill(stage, nodes).await).await
}

/// Plays in bounded time, and removes the cluster at the end.
async fn on_nodes(stage: &Stage, play: impl AsyncFnOnce(&Nodes) -> anyhow::Result<Finding>) -> anyhow::Result<Finding> {
    let script = match Nodes::find() {
        Ok(script) => script,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let played = async { play(&Nodes::start(script).await?).await };
    timeout(stage.time + LIMIT, played).await.context("the scenario takes too long")?
}

async fn play_fault(stage: &Stage, nodes: &Nodes, fault: Fault) -> anyhow::Result<Finding> {
    let (proxies, endless) = (RefCell::new(Vec::new()), stage.until_stopped());
    // A mutant is one of the other calls.
    let in_steps = stage.mutant.is_none() && fault != Fault::CutConnections;
    let loads = Loads::start(stage, in_steps, async |name, setup| {
        let setup = Setup { effects: Some(Effects::BesideTheKeys), ..setup };
        let world = World::on(nodes.create_database(name).await?, &endless, setup).await?;
        if fault == Fault::CutConnections {
            let mut more = before_workers(nodes, &world).await?;
            proxies.borrow_mut().append(&mut more);
        }
        Ok(world)
    })
    .await?;
    let proxies = proxies.into_inner();
    let until = Instant::now() + stage.time;
    let mut injected = Ok(());
    for round in 0.. {
        injected = fault.inject(nodes, &loads, &proxies, round).await;
        if injected.is_err() || (round + 1 >= LEAST && Instant::now() >= until) {
            break;
        }
    }
    if fault == Fault::CutConnections {
        sleep(PAST_ALL_HOLES).await;
    }
    loads.finding(injected, Answers::All).await
}

impl Fault {
    /// Injects the fault, and waits until the callers get answers again.
    async fn inject(self, nodes: &Nodes, loads: &Loads, proxies: &[Proxy], round: usize) -> anyhow::Result<()> {
        let (load, world) = (&loads.transactions, &loads.transactions.world);
        match self {
            Self::KilledWorker => kill(nodes, Node::WORKERS[round % 2], round / 2).await?,
            Self::KilledCoordinator => kill(nodes, Node::Coordinator, round).await?,
            Self::CutConnections => {
                proxies.iter().for_each(|proxy| proxy.cut(true));
                load.go_on(WHILE_CUT).await?;
                proxies.iter().for_each(|proxy| proxy.cut(false));
                // Its world counts each cut.
                return load.go_on(BETWEEN).await;
            }
            Self::MovedShards => {
                let (way, fault) = WAYS[round % 2];
                for world in loads.worlds() {
                    move_shard(nodes, world, way).await?;
                    world.fault(fault);
                }
                return load.go_on(BETWEEN).await;
            }
        }
        world.fault(self.name());
        load.go_on(BETWEEN).await
    }
}

/// Kills the postmaster alone, or the whole node.
async fn kill(nodes: &Nodes, node: Node, round: usize) -> anyhow::Result<()> {
    if round.is_multiple_of(2) {
        nodes.kill(node).await?
    } else {
        nodes.kill_all(node).await?
    }
    sleep(AWAY).await;
    nodes.start_again(node).await
}

/// Proxies through which the coordinator then reaches the workers.
async fn before_workers(nodes: &Nodes, world: &Arc<World>) -> anyhow::Result<Vec<Proxy>> {
    let mut proxies = Vec::new();
    for worker in Node::WORKERS.map(|worker| nodes.port(worker)) {
        let proxy = Proxy::before_port(world, worker).await?;
        let sql = "select citus_update_node(nodeid, nodename, $2) from pg_dist_node where nodeport = $1";
        let moved = sqlx::query(sql).bind(i32::from(worker)).bind(i32::from(proxy.options.get_port()));
        moved.execute(&world.observer).await?;
        proxies.push(proxy);
    }
    Ok(proxies)
}

/// Moves one shard of the records, with the effects beside them, to the other worker.
async fn move_shard(nodes: &Nodes, world: &World, way: &str) -> anyhow::Result<()> {
    let (shard, from): (i64, i32) = sqlx::query_as(
        "select shardid, nodeport from citus_shards where table_name::oid = 'idempotency.record'::regclass::oid
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

/// Both faults for two tables of effects on the coordinator: one that Citus knows, so that it commits in two phases,
/// and one that it does not know. Then the record commits on its worker first, and the effect later.
async fn cut_and_kill(stage: &Stage, nodes: &Nodes) -> anyhow::Result<Finding> {
    let (mut both, mut proxies) = (Vec::new(), Vec::new());
    for (name, effects) in [("known-to-citus", Effects::LocalToCitus), ("plain", Effects::Plain)] {
        let setup = Setup { least: LEAST_ON_LOCAL_TABLES, effects: Some(effects), ..Setup::default() };
        let world = World::on(nodes.create_database(name).await?, stage, setup).await?;
        proxies.extend(before_workers(nodes, &world).await?);
        let pool = pool_that_waits(&world.options, CLIENTS, WAIT);
        let way = Way::Transaction(|random, request| request.enter(random, SAFE_TO_DROP));
        both.push((effects, Callers::start(&world, way, pool, "c", CLIENTS as usize)));
    }
    for round in 1.. {
        proxies.iter().for_each(|proxy| proxy.cut(true));
        sleep(CUT_FOR).await;
        proxies.iter().for_each(|proxy| proxy.cut(false));
        kill(nodes, Node::Coordinator, round).await?;
        both.iter().for_each(|(_, callers)| callers.world.fault(Fault::KilledCoordinator.name()));
        sleep(CUT_FOR).await;
        if both.iter().all(|(_, callers)| callers.world.is_over()) {
            break;
        }
    }
    let mut finding = Finding::default();
    for (effects, mut callers) in both {
        callers.end().await?;
        // Citus itself does so each minute.
        sqlx::query("select recover_prepared_transactions()").execute(&callers.world.observer).await?;
        let (mut part, lost) = callers.check(Answers::All).await?;
        let without_effect = part.violations.iter().filter(|found| found.contains("without its effect")).count();
        part = part.note(format!("{effects:?}: {without_effect} records without their effect, {lost}"));
        if effects == Effects::Plain {
            let found = std::mem::take(&mut part.violations);
            if found.is_empty() {
                part.violations.push("the check does not see the losses of the plain table".to_owned());
            }
        }
        finding.add(part);
    }
    Ok(finding)
}
