//! What a scenario is given: a server, a subject, a seed and some time; and what it gives back.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::checker::violations;
use crate::cluster::Cluster;
use crate::history::longest_outage;
use crate::lease::{self, Leased};
use crate::lease_checker::{Promise, check};
use crate::subject::Subject;
use crate::world::World;
use crate::{step_checker, stepped};

/// The keys with a violation whose histories are kept.
const KEPT_HISTORIES: usize = 20;

pub(crate) struct Stage {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) subject: Subject,
    pub(crate) seed: u64,
    pub(crate) time: Duration,
    /// How much longer it may take, for what must happen at least.
    pub(crate) patience: Duration,
    /// How many calls it must make at least.
    pub(crate) calls: u64,
    /// The world that is being played, for who tells how far it is.
    shown: Mutex<Weak<World>>,
}

impl Stage {
    pub(crate) fn new(cluster: Arc<Cluster>, subject: Subject, seed: u64, time: Duration, patience: Duration) -> Self {
        Self { cluster, subject, seed, time, patience, calls: 0, shown: Mutex::default() }
    }

    /// As often as this, however long it takes.
    pub(crate) fn with_calls(self, calls: u64, patience: Duration) -> Self {
        Self { calls, patience: patience.max(self.patience), ..self }
    }

    /// The same on this server, for so long.
    pub(crate) fn part(&self, cluster: &Arc<Cluster>, time: Duration) -> Self {
        Self::new(cluster.clone(), self.subject, self.seed, time, self.patience).with_calls(self.calls, self.patience)
    }

    pub(crate) fn show(&self, world: &Arc<World>) {
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(world);
    }

    pub(crate) fn shown(&self) -> Option<Arc<World>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Finding {
    pub(crate) operations: usize,
    pub(crate) faults: Vec<(&'static str, u64)>,
    pub(crate) violations: Vec<String>,
    /// The events of the keys with a violation.
    pub(crate) histories: Vec<String>,
    pub(crate) longest_outage: Duration,
    /// What was counted and is no violation.
    pub(crate) notes: Vec<String>,
    /// Why it did not run.
    pub(crate) skipped: Option<String>,
}

impl Finding {
    pub(crate) fn skipped(why: impl ToString) -> Self {
        Self { skipped: Some(why.to_string()), ..Self::default() }
    }

    /// Of a world in transaction mode: settles it first, and then holds the callers' history against it.
    pub(crate) async fn of(world: &Arc<World>) -> anyhow::Result<Self> {
        world.settle().await?;
        let after = world.aftermath().await?;
        Ok(Self::with(world, violations(&world.history.calls(), &after)))
    }

    pub(crate) fn note(mut self, note: impl ToString) -> Self {
        self.notes.push(note.to_string());
        self
    }

    /// Of the scenario's other part.
    pub(crate) fn add(&mut self, other: Self) {
        self.operations += other.operations;
        for (kind, count) in other.faults {
            match self.faults.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, sum)) => *sum += count,
                None => self.faults.push((kind, count)),
            }
        }
        self.violations.extend(other.violations);
        self.histories.extend(other.histories);
        self.longest_outage = self.longest_outage.max(other.longest_outage);
        self.notes.extend(other.notes);
    }

    /// Of a world in lease mode.
    pub(crate) async fn of_leases(world: &Arc<World>, leased: Leased) -> anyhow::Result<Self> {
        if leased.promise == Promise::InSteps {
            return Self::of_steps(world, leased).await;
        }
        let decided = lease::settle(world, leased).await?;
        let checked = check(&world.history.calls(), &world.aftermath().await?, leased.promise);
        let doubles =
            format!("{} keys with more than one effect for a downstream that dedupes nothing", checked.doubles);
        let decided = format!("{decided} keys settled by an operator");
        Ok(Self::with(world, checked.violations).note(doubles).note(decided))
    }

    /// Of a world with operations in steps.
    async fn of_steps(world: &Arc<World>, leased: Leased) -> anyhow::Result<Self> {
        let left = stepped::finish(world, leased).await?;
        let resumed = world.history.calls().into_iter().filter(|call| call.was_resumed()).count();
        lease::settle(world, leased).await?;
        let after = world.aftermath().await?;
        let mut checked = step_checker::check(&world.history.calls(), &after, &stepped::parts(world).await?);
        if left > 0 {
            checked.violations.push(format!("{left} operations that resumers and operators did not finish"));
        }
        let (sent, withdrawn) = stepped::looked_up(world).await?;
        Ok(Self::with(world, checked.violations)
            .note(format!("{} operations in steps", after.records.len()))
            .note(format!("{resumed} operations finished by a resumer"))
            .note(format!("{} charges recognised by their key", checked.deduplicated))
            .note(format!("messages in doubt: {sent} sent, {withdrawn} not sent")))
    }

    pub(crate) fn with(world: &World, violations: Vec<String>) -> Self {
        let calls = world.history.calls();
        let keys: BTreeSet<&str> =
            violations.iter().filter_map(|said| said.split_once(": ")).map(|(key, _)| key).collect();
        let histories = keys.into_iter().take(KEPT_HISTORIES).flat_map(|key| world.history.of(key)).collect();
        let violations = world.shortfall().into_iter().chain(violations).collect();
        Self {
            operations: calls.len(),
            faults: world.faults(),
            histories,
            violations,
            longest_outage: longest_outage(&calls),
            ..Self::default()
        }
    }
}
