//! What the table contained during the last hour, from samples that the console takes itself. The samples are gone when
//! the console stops.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use pg_idempotency::operator::{self, State, Stats};
use sqlx::PgPool;
use tokio::time::sleep;

use crate::connection::ask;

/// How long a sample may take.
const TIME: Duration = Duration::from_secs(10);
/// The time that a chart shows.
pub(super) const SHOWN: Duration = Duration::from_secs(60 * 60);

/// A moment, and the content of the table. `None` if the database has not answered.
pub(super) type Sample = (DateTime<Utc>, Option<Content>);

#[derive(Clone)]
pub(super) struct Content {
    /// Whether the counts are exact, and not estimates.
    pub(super) exact: bool,
    pub(super) states: BTreeMap<State, u64>,
    /// How long the oldest expired record has waited for its sweep.
    pub(super) lag: Duration,
}

impl Content {
    fn of(stats: &Stats) -> Self {
        let mut states = BTreeMap::new();
        for group in &stats.groups {
            *states.entry(group.state).or_default() += group.records;
        }
        Self { exact: stats.exact, states, lag: stats.oldest_expired.unwrap_or_default() }
    }
}

pub(super) struct Samples {
    every: Duration,
    taken: Mutex<VecDeque<Sample>>,
}

impl Samples {
    /// Takes a sample now, and then one more after each pause of `every`. A sample costs as much as the command
    /// `stats`, which reads a part of a large table. A sample that fails leaves a gap. The sampling ends with the
    /// process.
    pub(super) fn start(pool: PgPool, every: Duration) -> Arc<Self> {
        let samples = Arc::new(Self { every, taken: Mutex::default() });
        let sampling = samples.clone();
        tokio::spawn(async move {
            loop {
                let stats = ask(TIME, operator::stats(&pool)).await;
                sampling.add(stats.ok().as_ref());
                sleep(every).await;
            }
        });
        samples
    }

    /// Adds a sample with the current time, and drops the samples that no chart shows any more.
    fn add(&self, stats: Option<&Stats>) {
        let (now, mut taken) = (Utc::now(), self.taken.lock().unwrap_or_else(PoisonError::into_inner));
        taken.retain(|(at, _)| now - at < chrono::Duration::from_std(SHOWN).unwrap_or_default());
        taken.push_back((now, stats.map(Content::of)));
    }

    /// The time between two samples, and the samples, the oldest first.
    pub(super) fn taken(&self) -> (Duration, Vec<Sample>) {
        (self.every, self.taken.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect())
    }
}
