//! The faults that make the leader change. Each waits until another node leads and the callers get answers from it,
//! then brings the old leader back, and waits until the formation is whole.

use super::formation::Formation;
use super::router;
use crate::callers::load::Load;

/// Answers before the next step: some tenths of a second of load.
const SOME: u64 = 60;
/// Callers that are connected to the leader past the proxy, before it is paused.
const DIRECT: u32 = 3;
/// The prefix of their names.
pub(crate) const DIRECT_NAME: &str = "direct";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An operator makes another node the leader.
    Switchover,
    /// SIGKILL to the leader's Patroni and to all of its PostgreSQL.
    Killed,
    /// The leader hears nothing from etcd, while callers and standbys still reach it.
    CutFromEtcd,
    /// SIGSTOP to the whole leader, and SIGCONT when another node leads.
    Paused,
}

impl Fault {
    pub(crate) const ALL: [Self; 4] = [Self::Switchover, Self::Killed, Self::CutFromEtcd, Self::Paused];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Switchover => "switchover",
            Self::Killed => "leader killed -9",
            Self::CutFromEtcd => "leader cut off from etcd",
            Self::Paused => "leader paused",
        }
    }

    /// `load` is in transaction mode. In every other `round` the proxy leaves the sessions with a paused leader open.
    pub(crate) async fn inject(self, formation: &Formation, load: &Load, round: usize) -> anyhow::Result<()> {
        formation.is_whole().await?;
        let old = formation.leader()?;
        match self {
            Self::Switchover => {
                formation.switch_over(old).await?;
                formation.leaves(old).await?;
                load.goes_on(SOME).await?;
            }
            Self::Killed => {
                old.kill().await?;
                formation.leaves(old).await?;
                load.goes_on(SOME).await?;
                formation.start_again(old)?;
            }
            Self::CutFromEtcd => {
                old.link.cut();
                formation.leaves(old).await?;
                load.goes_on(SOME).await?;
                old.link.mend();
            }
            Self::Paused => {
                let options = router::options(old.ports.sql);
                let name = format!("{DIRECT_NAME}{}-{round}-", old.name);
                let mut direct = Load::direct(&load.world, &options, &name, DIRECT);
                direct.goes_on(SOME).await?;
                formation.router.shut_sessions(round.is_multiple_of(2));
                old.pause();
                formation.leaves(old).await?;
                load.goes_on(SOME).await?;
                old.wake();
                formation.is_whole().await?;
                formation.router.shut_sessions(true);
                direct.stop().await?;
            }
        }
        formation.is_whole().await
    }
}
