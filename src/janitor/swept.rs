//! The counts of a sweep.

use std::time::Duration;

use crate::record::Deleted;

/// The records that one sweep deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Swept {
    /// Completed records. Their keys are new again.
    pub completed: u64,
    /// Records of operations that failed or lapsed, and that no caller has claimed again.
    pub unfinished: u64,
    /// [Indeterminate](crate::operator::State::Indeterminate) records. **Their effects may have happened, and their
    /// keys are new again**: a retry performs. The sweep also logs a warning. In transaction mode each comes from [a
    /// mistake of its caller](crate::Error::Indeterminate): find the cause.
    pub indeterminate: u64,
    /// Marks.
    pub marks: u64,
    /// Transactions that deleted records.
    pub batches: u64,
    /// Whether the limit or a shutdown ended the sweep while more was due.
    pub limited: bool,
    /// How long ago the oldest expired record had expired, at the end of the sweep. `None` if no record was due. A
    /// record can remain because another transaction has locked it, because it came due during the sweep, or because
    /// the sweep was [`limited`](Self::limited).
    pub oldest_after: Option<Duration>,
}

impl Swept {
    /// The number of deleted records.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.completed + self.unfinished + self.indeterminate + self.marks
    }

    pub(super) fn add(&mut self, deleted: Deleted) {
        self.completed += deleted.completed;
        self.unfinished += deleted.unfinished;
        self.indeterminate += deleted.indeterminate;
        self.marks += deleted.marks;
        self.batches += u64::from(deleted.rows() > 0);
    }

    /// The outcome for the sweep's span.
    pub(super) fn outcome(&self) -> &'static str {
        if self.limited { "limited" } else { "done" }
    }
}
