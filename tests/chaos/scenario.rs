//! The faults, one file each.

mod cut_connections;
mod dropped_futures;
mod duplicate_storm;
mod killed_backends;
mod killed_server;
mod killed_workers;

use crate::stage::{Finding, Stage};

/// In the order in which they are played; and how much of the time each gets.
pub(crate) const ALL: &[(&str, u32)] = &[
    ("dropped-futures", 2),
    ("killed-workers", 3),
    ("killed-backends", 2),
    ("killed-server", 4),
    ("cut-connections", 3),
    ("duplicate-storm", 2),
];

pub(crate) async fn play(name: &str, stage: &Stage) -> anyhow::Result<Finding> {
    match name {
        "dropped-futures" => dropped_futures::play(stage).await,
        "killed-workers" => killed_workers::play(stage).await,
        "killed-backends" => killed_backends::play(stage).await,
        "killed-server" => killed_server::play(stage).await,
        "cut-connections" => cut_connections::play(stage).await,
        "duplicate-storm" => duplicate_storm::play(stage).await,
        _ => anyhow::bail!("there is no scenario {name:?}; --list shows them"),
    }
}
