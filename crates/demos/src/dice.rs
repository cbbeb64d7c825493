//! Randomness.

use std::time::Duration;

use uuid::Uuid;

/// From 0 to `limit - 1`.
pub fn below(limit: usize) -> usize {
    // Six bits of this UUID are fixed. The lowest ones are random.
    (Uuid::new_v4().as_u128() % limit as u128) as usize
}

pub fn duration(least: Duration, most: Duration) -> Duration {
    least + Duration::from_micros(below((most - least).as_micros().max(1) as usize) as u64)
}
