//! The one decision that nobody can take for you.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::Mode;

/// Short enough for tests; past half a day somebody has mistaken the lease for the retention.
pub(super) const LEASE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(12 * 60 * 60);

/// What becomes of a claim whose owner is gone. There is no default.
///
/// `lease` is how long a claim lasts without a renewal, and so how long the next caller waits after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The next caller does the work again: for effects that may repeat, or that the other side dedupes.
    AtLeastOnce {
        /// From 10 ms to 12 hours; 40 s is usual.
        lease: Duration,
    },
    /// Nobody does it again until somebody has found out: for effects that must not repeat.
    AtMostOnce {
        /// From 10 ms to 12 hours; 40 s is usual.
        lease: Duration,
    },
}

impl Policy {
    /// How long a claim lasts without a renewal.
    #[must_use]
    pub const fn lease(self) -> Duration {
        match self {
            Self::AtLeastOnce { lease } | Self::AtMostOnce { lease } => lease,
        }
    }

    pub(crate) const fn mode(self) -> Mode {
        match self {
            Self::AtLeastOnce { .. } => Mode::AtLeastOnce,
            Self::AtMostOnce { .. } => Mode::AtMostOnce,
        }
    }
}
