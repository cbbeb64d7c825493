//! Randomness.

use std::time::Duration;

use uuid::Uuid;

/// From 0 to `limit - 1`.
pub(crate) fn below(limit: u128) -> u128 {
    // Six of its bits are fixed, and the lowest ones are not among them.
    Uuid::new_v4().as_u128() % limit
}

pub(crate) fn duration(least: Duration, most: Duration) -> Duration {
    least + Duration::from_micros(below((most - least).as_micros().max(1)) as u64)
}
