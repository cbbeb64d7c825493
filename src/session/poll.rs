//! The pauses of calls that wait without a connection: ask, give the connection back, pause, ask again.

use std::ops::Range;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::background::jittered;

/// The pause between two polls. It is short for a person who waits, and long enough to spare the database.
const PAUSES: Range<Duration> = Duration::from_millis(50)..Duration::from_millis(500);

/// How a call polls.
pub(crate) trait Polls {
    /// Pauses, and returns whether to ask again.
    fn rest(&mut self) -> impl Future<Output = bool> + Send;
}

/// The pauses of one call that polls. Each is twice as long as the one before.
pub(crate) struct Pauses(Duration);

/// Polls until a deadline.
pub(crate) struct PollsUntil {
    deadline: Instant,
    pauses: Pauses,
}

impl Default for Pauses {
    fn default() -> Self {
        Self(PAUSES.start)
    }
}

impl Pauses {
    pub(crate) fn next(&mut self) -> Duration {
        let pause = jittered(self.0);
        self.0 = (self.0 * 2).min(PAUSES.end);
        pause
    }
}

impl PollsUntil {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { deadline, pauses: Pauses::default() }
    }
}

impl Polls for PollsUntil {
    async fn rest(&mut self) -> bool {
        if Instant::now() >= self.deadline {
            return false;
        }
        sleep_until((Instant::now() + self.pauses.next()).min(self.deadline)).await;
        true
    }
}
