//! A load in each mode, at the same time.

use std::sync::Arc;
use std::time::Duration;

use super::leases::{Outside, stored_results};
use super::load::{Load, SETTLER, Way};
use super::marks;
use crate::checker::{self, Aftermath, by_key};
use crate::history::{Call, Moment};
use crate::lease::Leased;
use crate::lease_checker::{self, Promise};
use crate::stage::Finding;
use crate::world::World;

/// Shorter than many faults, so that the leases of callers that are cut off lapse.
const LEASE: Duration = Duration::from_secs(2);

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    /// Every answer is true.
    AllTrue,
    /// Nothing is promised about answers from before the last fault, and those that are lost are counted.
    LostWithAFault,
}

/// The callers of the three modes, each mode in a database of its own.
pub(crate) struct Loads {
    pub(crate) transactions: Load,
    marks: Load,
    at_least_once: Load,
    at_most_once: Load,
}

impl Loads {
    /// `world` makes the world of each.
    pub(crate) async fn start(world: impl AsyncFn(&'static str) -> anyhow::Result<Arc<World>>) -> anyhow::Result<Self> {
        let load = async |way: Way, name: &'static str, callers: u32| {
            anyhow::Ok(Load::start(&world(name).await?, way, name, callers))
        };
        let leases = |promise| Way::Lease(Leased { promise, lease: LEASE, work: 20 }, Arc::<Outside>::default());
        let marks = load(Way::Mark, "marks", 2).await?;
        let at_least_once = load(leases(Promise::AtLeastOnce), "at-least-once", 2).await?;
        let at_most_once = load(leases(Promise::AtMostOnce), "at-most-once", 2).await?;
        // The last world is the one whose progress is shown.
        let transactions = load(Way::Transaction, "transactions", 6).await?;
        Ok(Self { transactions, marks, at_least_once, at_most_once })
    }

    pub(crate) fn all(&self) -> [&Load; 4] {
        [&self.transactions, &self.marks, &self.at_least_once, &self.at_most_once]
    }

    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        for load in [&mut self.transactions, &mut self.marks, &mut self.at_least_once, &mut self.at_most_once] {
            load.stop().await?;
        }
        Ok(())
    }

    /// Asks for every key once more, and compares all answers with the tables and with the outside. Also returns when
    /// the answers were given that are lost.
    pub(crate) async fn check(&self, answers: Answers) -> anyhow::Result<(Finding, Vec<Moment>)> {
        let (mut finding, mut lost) = (Finding::default(), Vec::new());
        for load in self.all() {
            let (part, gone) = check(load, answers).await?;
            finding.add(part);
            lost.extend(gone);
        }
        Ok((finding, lost))
    }
}

async fn check(load: &Load, answers: Answers) -> anyhow::Result<(Finding, Vec<Moment>)> {
    let world = &load.world;
    let before = world.history.calls();
    let decided = load.settle().await?;
    let (calls, mut after) = (world.history.calls(), world.aftermath().await?);
    // What is left must be whole, and what is answered now must be true.
    let told = |call: &Call| answers == Answers::AllTrue || call.name.starts_with(SETTLER);
    let told: Vec<Call> = calls.into_iter().filter(told).collect();
    let (name, violations, gone, more) = match &load.way {
        Way::Transaction => ("transactions", checker::violations(&told, &after), lost(&before, &after), String::new()),
        Way::Mark => ("marks", marks::violations(&told, &after), lost(&before, &after), String::new()),
        Way::Lease(leased, outside) => {
            after.effects = outside.effects();
            let (name, promise) = match (leased.promise, answers) {
                (Promise::AtMostOnce, Answers::AllTrue) => ("leases at most once", Promise::AtMostOnce),
                // A lost claim is a second effect, which is counted.
                (Promise::AtMostOnce, Answers::LostWithAFault) => ("leases at most once", Promise::AtLeastOnce),
                _ => ("leases at least once", Promise::AtLeastOnce),
            };
            let checked = lease_checker::check(&told, &after, promise);
            let gone = lost(&before, &stored_results(&after));
            let more =
                format!(", {} keys with two effects outside, {decided} keys settled by an operator", checked.doubles);
            (name, checked.violations, gone, more)
        }
    };
    let given = before.iter().filter(|call| call.response().is_some()).count();
    let violations = violations.into_iter().map(|said| format!("{name}, {said}")).collect();
    let note = format!("{name}: {} of {given} answers lost ({} effects{more})", gone.len(), after.effects.len());
    let finding = Finding { operations: before.len(), faults: world.faults(), violations, ..Finding::default() };
    Ok((finding.note(note), gone))
}

/// When the answers were given that are not true any more.
fn lost(calls: &[Call], after: &Aftermath) -> Vec<Moment> {
    let keys = by_key(calls, after);
    let is_lost =
        |call: &&Call| call.response().is_some_and(|response| !keys[call.key.as_str()].has_effect_of(response));
    calls.iter().filter(is_lost).map(|call| call.ended).collect()
}
