//! The background search for the keys that wait for a person.
//!
//! It reads the whole table in short parts with rests, while somebody looks at the list. A page shows the result of the
//! last search, so it need not wait for one.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use pg_idempotency::operator::{self, Unsettled};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::link;
use crate::connection::{CONNECT_TIMEOUT, Database};
use crate::failure::{Failure, of};

/// The records of one part: some 10 ms of work for the server.
const PART: u32 = 10_000;
/// The list keeps this many keys, the oldest: more than people settle in a day, in some megabytes.
pub(super) const MOST: usize = 10_000;
/// A page waits this long for a search. Most tables need less.
const PATIENCE: Duration = Duration::from_millis(100);
/// The shortest rest between two searches.
const REST: Duration = Duration::from_millis(250);

/// The result of a search.
#[derive(Clone, Default)]
pub(super) struct Found {
    /// The records with their links, the oldest claim first.
    pub(super) records: Vec<(String, Unsettled)>,
    /// How many records the search has read.
    pub(super) read: u64,
    /// When the search ended; `None` during the first search.
    pub(super) ended: Option<DateTime<Utc>>,
    /// Why the last search failed.
    pub(super) error: Option<String>,
}

pub(super) struct Search {
    database: Database,
    max_attempts: Option<NonZeroU32>,
    found: Mutex<Found>,
    wanted: Notify,
    ended: Notify,
}

impl Search {
    pub(super) fn new(database: Database, max_attempts: Option<NonZeroU32>) -> Self {
        Self { database, max_attempts, found: Mutex::default(), wanted: Notify::new(), ended: Notify::new() }
    }

    pub(super) fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a search unless one is running, and waits a moment for its end.
    pub(super) async fn refresh(&self) {
        let ended = self.ended.notified();
        self.wanted.notify_one();
        let _ = timeout(PATIENCE, ended).await;
    }

    /// Removes a settled key from the list, before the next search does.
    pub(super) fn settled(&self, link: &str) {
        self.found().records.retain(|(listed, _)| listed != link);
    }

    /// Searches whenever a page asks for it, and never returns.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            self.wanted.notified().await;
            let began = Instant::now();
            // In a task, so that a search that panics is not the last one.
            let searching = tokio::spawn({
                let search = self.clone();
                async move { search.search().await }
            });
            let error = match searching.await {
                Ok(searched) => searched.err().map(|failure| failure.in_one_line()),
                Err(panic) => Some(format!("the console has a bug: {panic}")),
            };
            self.found().error = error;
            self.ended.notify_waiters();
            // Searches take at most half of the time, however often people reload the list.
            sleep(began.elapsed().max(REST)).await;
        }
    }

    async fn search(&self) -> Result<(), Failure> {
        let pool = self.database.pool().await?;
        let (mut new, mut after) = (Found::default(), None);
        loop {
            let began = Instant::now();
            let part = operator::unsettled_part(&pool, after, PART, self.max_attempts);
            let part = timeout(CONNECT_TIMEOUT, part).await.map_err(|_| Failure::Silence)?.map_err(of)?;
            let linked = |record: Unsettled| (link(&record.scope, &record.operation, &record.value), record);
            new.records.extend(part.found.into_iter().map(linked));
            new.records.sort_by_key(|(_, record)| record.claimed_at);
            new.records.truncate(MOST);
            new.read += part.read;
            after = part.next;
            if after.is_none() {
                new.ended = Some(Utc::now());
                *self.found() = new;
                return Ok(());
            }
            // An earlier search's list is complete, so only the first search shows a part of its own.
            if self.found().ended.is_none() {
                *self.found() = new.clone();
            }
            sleep(began.elapsed()).await;
        }
    }
}
