//! The search for the keys that wait for a person, in the background: it reads the whole table, in short parts with
//! rests, while somebody looks at the list. A page shows what the last search has found, and so takes no time.

use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use pg_idempotency::Key;
use pg_idempotency::operator::{self, Unsettled};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::connection::{CONNECT_TIMEOUT, Database};
use crate::failure::{Failure, of};

/// The records of one part: some 10 ms of the server's work.
const PART: u32 = 10_000;
/// More than anybody settles in a day, and some megabytes. The oldest stay.
const MOST: usize = 10_000;
/// A page waits so long for a search, which for most tables is its whole time.
const PATIENCE: Duration = Duration::from_millis(100);
/// The shortest rest between two searches.
const REST: Duration = Duration::from_millis(250);

/// What a search has found.
#[derive(Clone, Default)]
pub(super) struct Found {
    /// The oldest claim first.
    pub(super) records: Vec<Unsettled>,
    /// How many records it has read.
    pub(super) read: u64,
    /// When it ended; `None` while the first one goes on.
    pub(super) ended: Option<DateTime<Utc>>,
    /// Why the last search failed.
    pub(super) error: Option<String>,
}

impl Found {
    pub(super) fn is_full(&self) -> bool {
        self.records.len() == MOST
    }
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

    /// Begins a search, unless one goes on, and waits a moment for its end.
    pub(super) async fn refresh(&self) {
        let ended = self.ended.notified();
        self.wanted.notify_one();
        let _ = timeout(PATIENCE, ended).await;
    }

    /// What is settled leaves the list at once.
    pub(super) fn settled(&self, key: &Key) {
        let is = |record: &Unsettled| {
            (&*record.scope, &*record.operation, &*record.value) == (key.scope(), key.operation(), key.value())
        };
        self.found().records.retain(|record| !is(record));
    }

    /// Searches when a page asks for it, for ever.
    pub(super) async fn run(&self) {
        loop {
            self.wanted.notified().await;
            let began = Instant::now();
            let error = self.pass().await.err().map(|failure| failure.in_one_line());
            self.found().error = error;
            self.ended.notify_waiters();
            // Half of the time at most goes into searching, whoever reloads a page.
            sleep(began.elapsed().max(REST)).await;
        }
    }

    fn publish(&self, new: Found) {
        let mut found = self.found();
        // What an earlier search has found is complete, and this one is not yet.
        if new.ended.is_some() || found.ended.is_none() {
            *found = new;
        }
    }

    async fn pass(&self) -> Result<(), Failure> {
        let mut conn = self.database.connect().await?;
        let (mut records, mut read, mut after) = (Vec::new(), 0, None);
        loop {
            let began = Instant::now();
            let part = operator::unsettled_part(&mut conn, after, PART, self.max_attempts);
            let part = timeout(CONNECT_TIMEOUT, part).await.map_err(|_| Failure::Silence)?.map_err(of)?;
            records.extend(part.found);
            records.sort_by_key(|record: &Unsettled| record.claimed_at);
            records.truncate(MOST);
            read += part.read;
            after = part.next;
            let ended = after.is_none().then(Utc::now);
            self.publish(Found { records: records.clone(), read, ended, error: None });
            if ended.is_some() {
                return Ok(());
            }
            sleep(began.elapsed()).await;
        }
    }
}
