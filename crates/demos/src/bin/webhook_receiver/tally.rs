//! What the receiver has answered.

use std::time::Duration;

use crate::sender::Answer;

#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) first: usize,
    pub(crate) duplicates: usize,
    pub(crate) failed: usize,
    pub(crate) in_flight: usize,
    pub(crate) unavailable: usize,
    pub(crate) forged: usize,
    pub(crate) stale: usize,
    pub(crate) errors: usize,
    pub(crate) first_error: Option<String>,
    latencies: Vec<Duration>,
}

impl Tally {
    pub(crate) fn count(&mut self, answer: &Answer) {
        self.latencies.push(answer.latency);
        let counter = match (answer.status, answer.body.duplicate, answer.body.error.as_deref()) {
            (200, Some(false), _) => &mut self.first,
            (200, Some(true), _) => &mut self.duplicates,
            (500, _, Some("failed")) => &mut self.failed,
            (503, _, Some("in flight")) => &mut self.in_flight,
            (503, _, Some("unavailable")) => &mut self.unavailable,
            (401, _, Some("forged")) => &mut self.forged,
            (401, _, Some("stale")) => &mut self.stale,
            (status, _, error) => {
                self.first_error.get_or_insert_with(|| format!("{status}: {}", error.unwrap_or("no reason")));
                &mut self.errors
            }
        };
        *counter += 1;
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.first += other.first;
        self.duplicates += other.duplicates;
        self.failed += other.failed;
        self.in_flight += other.in_flight;
        self.unavailable += other.unavailable;
        self.forged += other.forged;
        self.stale += other.stale;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.latencies.extend(other.latencies);
    }

    pub(crate) fn deliveries(&self) -> usize {
        self.latencies.len()
    }

    /// The latency in milliseconds that this share of the answers did not exceed.
    pub(crate) fn percentile(&mut self, share: f64) -> f64 {
        self.latencies.sort_unstable();
        // Nearest rank: of one sample, that one.
        let rank = (self.latencies.len() as f64 * share).ceil() as usize;
        self.latencies.get(rank.saturating_sub(1)).map_or(f64::NAN, |latency| latency.as_secs_f64() * 1000.0)
    }
}
