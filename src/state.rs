//! The state of a record.

use std::fmt;

/// The state of a record, as of one moment. Operators and the janitor's counts get it from one SQL expression, and a
/// call derives the same from what it reads.
///
/// A record in lease mode whose attempts are used up is [`Lapsed`](Self::Lapsed) or [`Released`](Self::Released) here,
/// because the record does not know the service's limit. If you know it,
/// [`Shown::is_exhausted`](crate::operator::Shown::is_exhausted) tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum State {
    /// The operation is complete: a retry gets its response.
    Completed,
    /// The key is marked: a retry is a duplicate.
    Mark,
    /// Its owner works under a live lease.
    InFlight,
    /// Its claim was given up: the next caller may claim it at once.
    Released,
    /// Its lease has lapsed, and its policy lets the next caller do the work again.
    Lapsed,
    /// Its owner is gone, and nobody knows whether it, or a step of it, took effect. It waits for an operator, or,
    /// in lease mode, for a [`Reconciler`](crate::lease::Reconciler).
    Indeterminate,
    /// Its retention has ended: the key is new, whether or not a sweep has deleted the record.
    Expired,
}

impl State {
    /// All states.
    pub(crate) const ALL: &'static [Self] = &[
        Self::Completed,
        Self::Mark,
        Self::InFlight,
        Self::Released,
        Self::Lapsed,
        Self::Indeterminate,
        Self::Expired,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Mark => "mark",
            Self::InFlight => "in_flight",
            Self::Released => "released",
            Self::Lapsed => "lapsed",
            Self::Indeterminate => "indeterminate",
            Self::Expired => "expired",
        }
    }

    /// Reads the result of the SQL expression.
    pub(crate) fn from_column(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|state| state.as_str() == text)
    }
}

/// The name, as in the output of `idempotency-janitor` and in metrics: `in_flight`.
impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
