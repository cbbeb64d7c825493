//! What happens after a crash: the decision that only the service can make.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::Mode;

/// 10 ms is short enough for tests. A lease above 12 hours is probably meant as a retention.
pub(super) const LEASE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(12 * 60 * 60);

/// What the next caller does when the owner of a claim is gone. There is no default.
///
/// `lease` is how long a claim lasts without a renewal, and so how long the next caller waits after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The next caller does the work again. For effects that may repeat, or that the other service deduplicates.
    AtLeastOnce {
        /// From 10 ms to 12 hours. 40 s is usual.
        lease: Duration,
    },
    /// The next caller continues after the last [step](super::Lease::step) that is stored. Work outside a step may
    /// repeat. If an [at-most-once step](super::Lease::step_at_most_once) is in doubt, nobody continues until it
    /// is settled, by an operator or a [`Reconciler`](super::Reconciler), or the retention ends.
    InSteps {
        /// From 10 ms to 12 hours. 40 s is usual.
        lease: Duration,
    },
    /// Nobody does the work again until the key is settled, by an operator or a [`Reconciler`](super::Reconciler), or
    /// its retention ends. For effects that must not repeat.
    AtMostOnce {
        /// From 10 ms to 12 hours. 40 s is usual.
        lease: Duration,
    },
}

impl Policy {
    /// How long a claim lasts without a renewal.
    #[must_use]
    pub const fn lease(self) -> Duration {
        match self {
            Self::AtLeastOnce { lease } | Self::InSteps { lease } | Self::AtMostOnce { lease } => lease,
        }
    }

    pub(crate) const fn mode(self) -> Mode {
        match self {
            Self::AtLeastOnce { .. } => Mode::AtLeastOnce,
            Self::InSteps { .. } => Mode::InSteps,
            Self::AtMostOnce { .. } => Mode::AtMostOnce,
        }
    }
}
