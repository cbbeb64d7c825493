//! How much of the heap one request takes while it waits, as the program `memory` counts it.

use std::collections::BTreeMap;
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use tokio::process::Command;

use crate::results::{Row, Table, rounded};

pub(crate) const NAME: &str = "memory";

pub(crate) const TITLE: &str = "Heap of one request that waits";
pub(crate) const BARE: &str = "handler without the layer";
pub(crate) const LEASED: &str = "running under a lease";
pub(crate) const QUEUED: &str = "waiting for a place";
pub(crate) const BYTES: &str = "heap of a request, B";

pub(crate) async fn run() -> anyhow::Result<Vec<Table>> {
    let program = std::env::var("MEMORY_PROGRAM").context("MEMORY_PROGRAM names no program; run script/bench")?;
    let output = Command::new(program).stderr(Stdio::inherit()).output().await?;
    ensure!(output.status.success(), "the program memory failed: {}", output.status);
    let rows = String::from_utf8(output.stdout)?.lines().map(row).collect::<anyhow::Result<_>>()?;
    Ok(vec![Table::new(TITLE, "", "", rows)])
}

fn row(line: &str) -> anyhow::Result<Row> {
    let (way, bytes) = line.split_once(": ").context("a line has a name and a number of bytes")?;
    let costs = BTreeMap::from([(BYTES.to_owned(), rounded(bytes.parse()?))]);
    Ok(Row { way: way.to_owned(), speed: None, costs })
}
