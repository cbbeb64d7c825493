//! Waiting for another owner without holding a connection: ask, give the connection back, rest, ask again.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Between two polls: soon enough for a person, seldom enough for a database.
const PAUSES: std::ops::Range<Duration> = Duration::from_millis(50)..Duration::from_millis(500);

/// The rests of one waiting call: each twice as long as the one before, none past the moment to give up.
pub(crate) struct Polls {
    give_up_at: Instant,
    pause: Duration,
}

impl Polls {
    pub(crate) fn until(give_up_at: Instant) -> Self {
        Self { give_up_at, pause: PAUSES.start }
    }

    /// Rests, and says whether to ask again.
    pub(crate) async fn rest(&mut self) -> bool {
        if Instant::now() >= self.give_up_at {
            return false;
        }
        sleep_until((Instant::now() + jittered(self.pause)).min(self.give_up_at)).await;
        self.pause = (self.pause * 2).min(PAUSES.end);
        true
    }
}

/// Between half of it and all of it, so that those who came together do not come back together.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    pause.mul_f64(0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0)
}
