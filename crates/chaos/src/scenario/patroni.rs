//! Failover under Patroni: the leader changes in four ways, under load in all modes. Only here is a primary lost. With
//! strict synchronous replication nothing that was acknowledged is lost. With asynchronous replication the losses are
//! counted.

use std::time::Duration;

use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgPool};
use tokio::time::Instant;

use crate::callers::loads::Loads;
use crate::callers::{Answers, Callers, Pace, Way};
use crate::cluster::on_port;
use crate::finding::Finding;
use crate::patroni::formation::{Formation, Replication};
use crate::patroni::node::Node;
use crate::patroni::programs::Programs;
use crate::request::EVERY_DOOR;
use crate::stage::Stage;
use crate::world::World;

/// Answers between two faults.
const BETWEEN: u64 = 200;
/// Answers that the delayed standbys do not get before the leader is lost.
const DELAYED: u64 = 200;
/// Answers before the next part of a fault: some tenths of a second of load.
const SOME: u64 = 60;
/// Callers that are connected to the leader past the proxy, before it is paused.
const DIRECT: u32 = 3;

/// Its calls go on when a paused node wakes.
const DIRECT_PACE: Pace = Pace { limit: Duration::from_secs(60), ..Pace::QUICK };

/// Injects each fault at least twice under strict replication, and at least once under asynchronous replication.
pub(super) async fn play(stage: &Stage, replication: Replication) -> anyhow::Result<Finding> {
    let programs = match Programs::find() {
        Ok(programs) => programs,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let formation = Formation::start(programs, replication).await?;
    // With asynchronous replication, the mark of a text can be lost like everything that was acknowledged, and the text
    // is sent twice. So nothing would be left to check.
    let strict = replication == Replication::Strict;
    let loads = start_loads(stage, &formation, strict).await?;
    let injected = inject_all(&formation, &loads, if strict { 2 } else { 1 }, stage.time).await;
    // Asynchronous replication promises nothing about answers from before a failover.
    loads.finding(injected, if strict { Answers::All } else { Answers::AfterTheFault }).await
}

/// Injects rounds of all faults until the time is over, and at least `least` rounds.
async fn inject_all(formation: &Formation, loads: &Loads, least: usize, time: Duration) -> anyhow::Result<()> {
    let until = Instant::now() + time;
    let mut round = 0;
    while round < least || Instant::now() < until {
        for fault in Fault::ALL {
            loads.transactions.go_on(BETWEEN).await?;
            fault.inject(formation, &loads.transactions, round).await?;
            loads.transactions.world.fault(fault.name());
        }
        round += 1;
    }
    loads.transactions.go_on(BETWEEN).await
}

/// Shows that the strict rule can fail: the standbys are cut off, the leader goes on and is lost, and a standby takes
/// its place.
pub(super) async fn play_delayed(stage: &Stage) -> anyhow::Result<Finding> {
    let programs = match Programs::find() {
        Ok(programs) => programs,
        Err(why) => return Ok(Finding::skipped(why)),
    };
    let formation = Formation::start(programs, Replication::Asynchronous).await?;
    let mut loads = start_loads(stage, &formation, false).await?;
    loads.transactions.go_on(BETWEEN).await?;
    let receivers = formation.stop_receivers().await?;
    loads.transactions.go_on(DELAYED).await?;
    let old = formation.leader()?;
    old.kill().await?;
    // A receiver loses what has arrived and is not yet written.
    formation.kill_receivers(&receivers)?;
    formation.leaves(old).await?;
    loads.transactions.go_on(BETWEEN).await?;
    loads.transactions.world.fault("leader killed -9, its standbys cut off before");
    formation.start_again(old)?;
    formation.is_whole().await?;
    loads.stop().await?;
    let mut finding = loads.check(Answers::AfterTheFault).await?;
    let strict = loads.check(Answers::All).await?;
    let found = strict.violations.iter().filter(|said| said.contains("which is not there")).count();
    if found == 0 {
        finding.violations.push("the strict rule does not see the answers that were lost here".to_owned());
    }
    Ok(finding.note(format!("the strict rule finds {found} lost answers, as it must")))
}

async fn start_loads(stage: &Stage, formation: &Formation, in_steps: bool) -> anyhow::Result<Loads> {
    let endless = stage.until_stopped();
    let world = async |name, setup| World::on(formation.create_database(name).await?, &endless, setup).await;
    Loads::start(stage, in_steps, world).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// An operator makes another node the leader.
    Switchover,
    /// SIGKILL to the leader's Patroni and to all of its PostgreSQL.
    Killed,
    /// The leader receives nothing from etcd, while callers and standbys still reach it.
    CutFromEtcd,
    /// SIGSTOP to the whole leader, and SIGCONT when another node leads.
    Paused,
}

impl Fault {
    const ALL: [Self; 4] = [Self::Switchover, Self::Killed, Self::CutFromEtcd, Self::Paused];

    fn name(self) -> &'static str {
        match self {
            Self::Switchover => "switchover",
            Self::Killed => "leader killed -9",
            Self::CutFromEtcd => "leader cut off from etcd",
            Self::Paused => "leader paused",
        }
    }

    /// Waits until another node leads and the callers of `load` get answers from it, brings the old leader back, and
    /// waits until the formation is whole. `load` is in transaction mode. In every other `round` the proxy leaves the
    /// sessions with a paused leader open.
    async fn inject(self, formation: &Formation, load: &Callers, round: usize) -> anyhow::Result<()> {
        formation.is_whole().await?;
        let old = formation.leader()?;
        match self {
            Self::Switchover => {
                formation.switch_over(old).await?;
                formation.leaves(old).await?;
                load.go_on(SOME).await?;
            }
            Self::Killed => {
                old.kill().await?;
                formation.leaves(old).await?;
                load.go_on(SOME).await?;
                formation.start_again(old)?;
            }
            Self::CutFromEtcd => {
                old.link.cut();
                formation.leaves(old).await?;
                load.go_on(SOME).await?;
                old.link.mend();
            }
            Self::Paused => {
                let (name, way) = (
                    format!("direct-{}-{round}-", old.name),
                    Way::Transaction(|random, request| request.enter(random, EVERY_DOOR)),
                );
                let pool = connected_to(old, &load.world);
                let mut direct = Callers::paced(&load.world, way, pool, &name, DIRECT as usize, DIRECT_PACE);
                direct.go_on(SOME).await?;
                formation.router.shut_sessions(round.is_multiple_of(2));
                old.pause();
                formation.leaves(old).await?;
                load.go_on(SOME).await?;
                old.wake();
                formation.is_whole().await?;
                formation.router.shut_sessions(true);
                direct.stop().await?;
            }
        }
        formation.is_whole().await
    }
}

/// Connections to this node past the proxy, if it is a primary. That is what `target_session_attrs=read-write` asks
/// for.
fn connected_to(node: &Node, world: &World) -> PgPool {
    let database = world.options.get_database().unwrap_or("postgres");
    PgPoolOptions::new()
        .max_connections(DIRECT)
        .acquire_timeout(Duration::from_secs(1))
        .after_connect(|conn, _| {
            Box::pin(async move {
                let standby: bool = sqlx::query_scalar("select pg_is_in_recovery()").fetch_one(&mut *conn).await?;
                if standby { Err(sqlx::Error::Protocol("a standby".to_owned())) } else { conn.ping().await }
            })
        })
        .connect_lazy_with(on_port(node.ports.sql).database(database))
}
