//! The faults, one file each.

mod bounded_waits;
mod citus;
mod clock_jumps;
mod committed_errors;
mod cut_connections;
mod dropped_futures;
mod duplicate_storm;
mod full_disk;
mod janitor_races;
mod killed_backends;
mod killed_leases;
mod killed_server;
mod killed_workers;
mod lock_conflicts;
mod patroni;
mod pooled_transactions;
mod prepared_transactions;
mod promoted_standby;
mod rolling_upgrade;
mod slow_network;
mod suspended_owners;
mod weak_durability;

use crate::lease_checker::Promise;
use crate::patroni::formation::Replication;
use crate::stage::{Finding, Stage};
use citus::Fault;

/// In the order in which they are played; and how much of the time each gets.
pub(crate) const ALL: &[(&str, u32)] = &[
    ("dropped-futures", 2),
    ("killed-workers", 3),
    ("killed-backends", 2),
    ("killed-server", 4),
    ("cut-connections", 3),
    ("duplicate-storm", 2),
    ("lock-conflicts", 2),
    ("bounded-waits", 2),
    ("committed-errors", 2),
    ("suspended-owners", 3),
    ("suspended-at-most-once", 2),
    ("janitor-races", 2),
    ("killed-leases", 3),
    ("killed-leases-at-most-once", 3),
    ("killed-steps", 3),
    ("suspended-steps", 3),
    ("killed-server-steps", 3),
    ("weak-durability", 3),
    ("pooled-transactions", 2),
    ("promoted-standby", 2),
    ("promoted-async-standby", 2),
    ("prepared-transactions", 2),
    ("rolling-upgrade", 2),
    ("clock-jumps", 3),
    ("full-disk", 2),
    ("slow-network", 2),
];

/// Those of `--patroni`, which need Patroni and etcd, and minutes for a fault that others inject in seconds.
pub(crate) const PATRONI: &[(&str, u32)] =
    &[("patroni-strict", 6), ("patroni-asynchronous", 3), ("patroni-delayed", 1)];

/// Those of `--citus`, which need a build of Citus.
pub(crate) const CITUS: &[(&str, u32)] = &[
    ("citus-killed-worker", 1),
    ("citus-killed-coordinator", 1),
    ("citus-cut-connections", 1),
    ("citus-moved-shards", 1),
    ("citus-local-table", 1),
];

pub(crate) async fn play(name: &str, stage: &Stage) -> anyhow::Result<Finding> {
    match name {
        "dropped-futures" => dropped_futures::play(stage).await,
        "killed-workers" => killed_workers::play(stage).await,
        "killed-backends" => killed_backends::play(stage).await,
        "killed-server" => killed_server::play(stage).await,
        "cut-connections" => cut_connections::play(stage).await,
        "duplicate-storm" => duplicate_storm::play(stage).await,
        "bounded-waits" => bounded_waits::play(stage).await,
        "lock-conflicts" => lock_conflicts::play(stage).await,
        "committed-errors" => committed_errors::play(stage).await,
        "suspended-owners" => suspended_owners::play(stage, Promise::AtLeastOnce).await,
        "suspended-at-most-once" => suspended_owners::play(stage, Promise::AtMostOnce).await,
        "janitor-races" => janitor_races::play(stage).await,
        "killed-leases" => killed_leases::play(stage, Promise::AtLeastOnce).await,
        "killed-leases-at-most-once" => killed_leases::play(stage, Promise::AtMostOnce).await,
        "killed-steps" => killed_leases::play(stage, Promise::InSteps).await,
        "suspended-steps" => suspended_owners::play(stage, Promise::InSteps).await,
        "killed-server-steps" => killed_server::play_steps(stage).await,
        "weak-durability" => weak_durability::play(stage).await,
        "pooled-transactions" => pooled_transactions::play(stage).await,
        "promoted-standby" => promoted_standby::play(stage, true).await,
        "promoted-async-standby" => promoted_standby::play(stage, false).await,
        "prepared-transactions" => prepared_transactions::play(stage).await,
        "rolling-upgrade" => rolling_upgrade::play(stage).await,
        "clock-jumps" => clock_jumps::play(stage).await,
        "full-disk" => full_disk::play(stage).await,
        "slow-network" => slow_network::play(stage).await,
        "patroni-strict" => patroni::play(stage, Replication::Strict).await,
        "patroni-asynchronous" => patroni::play(stage, Replication::Asynchronous).await,
        "patroni-delayed" => patroni::play_delayed(stage).await,
        "citus-killed-worker" => citus::play(stage, Fault::KilledWorker).await,
        "citus-killed-coordinator" => citus::play(stage, Fault::KilledCoordinator).await,
        "citus-cut-connections" => citus::play(stage, Fault::CutConnections).await,
        "citus-moved-shards" => citus::play(stage, Fault::MovedShards).await,
        "citus-local-table" => citus::play_local_tables(stage).await,
        _ => anyhow::bail!("there is no scenario {name:?}; --list shows them"),
    }
}
