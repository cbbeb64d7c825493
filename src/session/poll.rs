//! The pauses of calls that wait without a connection (ask, give the connection back, pause, ask again), and of loops
//! in the background.

use std::ops::Range;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// The pause between two polls. It is short for a person who waits, and long enough to spare the database.
const PAUSES: Range<Duration> = Duration::from_millis(50)..Duration::from_millis(500);

/// The pause of a loop after its first error. Most errors are over in a moment; if not, the pause doubles with each
/// error.
const FIRST_RETRY: Duration = Duration::from_secs(1);

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

/// The pauses of a loop in the background that goes on after errors.
pub(crate) struct Rests {
    interval: Duration,
    retry: Duration,
}

impl Rests {
    pub(crate) fn of(interval: Duration) -> Self {
        Self { interval, retry: FIRST_RETRY }
    }

    /// The pause after a pass that succeeded, and before the first.
    pub(crate) fn interval(&mut self) -> Duration {
        self.retry = FIRST_RETRY;
        jittered(self.interval)
    }

    /// No pause, because a pass has done something and more may be there.
    pub(crate) fn none(&mut self) -> Duration {
        self.retry = FIRST_RETRY;
        Duration::ZERO
    }

    /// The pause after an error.
    pub(crate) fn after_error(&mut self) -> Duration {
        let pause = jittered(self.retry);
        self.retry = (self.retry * 2).min(self.interval.max(FIRST_RETRY));
        pause
    }
}

/// A time between half of the pause and the whole pause, so that callers that asked together do not ask again together.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause.mul_f64(0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0)
}
