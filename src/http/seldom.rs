//! The lines of the log that clients can cause: one a minute for each operation and kind.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const PACE: Duration = Duration::from_secs(60);
/// A service may make operations of what clients send. The lines above this number are of one kind.
const KINDS: usize = 256;

/// When which line was written last, and how many were left out since.
#[derive(Default)]
pub(super) struct Seldom(Mutex<HashMap<(String, String), (Instant, u64)>>);

impl Seldom {
    /// Whether to write a line, and how many like it were left out since the last one. `None`: this one is left out.
    pub(super) fn due(&self, operation: Option<&str>, kind: &str) -> Option<u64> {
        self.due_at(operation, kind, Instant::now())
    }

    fn due_at(&self, operation: Option<&str>, kind: &str, now: Instant) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = (operation.unwrap_or_default().to_owned(), kind.to_owned());
        if !lines.contains_key(&line) && lines.len() >= KINDS {
            // A line that has left nothing out is not missed.
            lines.retain(|_, (written, left_out)| *left_out > 0 || now.duration_since(*written) < PACE);
            if lines.len() >= KINDS {
                line = Default::default();
            }
        }
        match lines.get_mut(&line) {
            Some((written, left_out)) if now.duration_since(*written) < PACE => {
                *left_out += 1;
                None
            }
            known => {
                let left_out = known.map_or(0, |(_, left_out)| *left_out);
                lines.insert(line, (now, 0));
                Some(left_out)
            }
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/http/seldom.rs"]
mod tests;
