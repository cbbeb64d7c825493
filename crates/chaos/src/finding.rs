//! The result of a scenario.

use std::time::Duration;

use crate::checker::Aftermath;
use crate::checker::histories::{self, Told};
use crate::history::Call;

#[derive(Debug, Default)]
pub(crate) struct Finding {
    pub(crate) operations: usize,
    pub(crate) faults: Vec<(&'static str, u64)>,
    pub(crate) violations: Vec<String>,
    /// The events of the keys with a violation.
    pub(crate) histories: Vec<String>,
    pub(crate) longest_outage: Duration,
    /// The keys whose answers were checked as a register, and those with too many unknown results.
    pub(crate) registers: usize,
    pub(crate) registers_left_out: usize,
    /// The histories for the specification.
    pub(crate) told: Told,
    /// Counts that do not violate a promise.
    pub(crate) notes: Vec<String>,
    /// The reason why the scenario did not run.
    pub(crate) skipped: Option<String>,
}

impl Finding {
    pub(crate) fn skipped(why: impl ToString) -> Self {
        Self { skipped: Some(why.to_string()), ..Self::default() }
    }

    pub(crate) fn note(mut self, note: impl ToString) -> Self {
        self.notes.push(note.to_string());
        self
    }

    /// Keeps histories of these calls, which are all calls of a world.
    pub(crate) fn tell(mut self, mode: Option<&str>, calls: &[Call], after: &Aftermath) -> Self {
        self.told = histories::of(mode, calls, after, &self.violations);
        self
    }

    /// Adds the finding of another part of the scenario.
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
        self.registers += other.registers;
        self.registers_left_out += other.registers_left_out;
        self.told.add(other.told);
        self.notes.extend(other.notes);
    }

    pub(crate) fn sum_of_faults(&self) -> u64 {
        self.faults.iter().map(|(_, count)| count).sum()
    }
}
