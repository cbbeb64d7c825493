//! The requests of this process, by their keys.
//!
//! A duplicate of a request that this process performs is refused or delayed without a connection, and so a storm of
//! duplicates stays out of the pool. Of all other requests with one key, only a few have their turn at a time. So a
//! storm of replays, or of duplicates that poll for a request of another process, leaves the places of the
//! [runs](super::runs) to other keys. The database alone decides which request performs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, timeout_at};

use crate::claim::RETRY_AFTER;
use crate::{Error, Fingerprint, Key};

/// The requests with one key.
struct Requests {
    /// How many requests hold this value.
    count: usize,
    /// The fingerprint of the request that performs, and a channel that closes when that request has ended.
    performing: Option<(Fingerprint, watch::Receiver<()>)>,
    turns: Arc<Semaphore>,
}

/// Shared by a layer and its clones.
#[derive(Clone, Default)]
pub(super) struct LocalInFlight(Arc<Mutex<HashMap<Key, Requests>>>);

/// A request of this process. `LocalInFlight` has its key while this value lives.
struct Present {
    local: LocalInFlight,
    key: Key,
}

/// The turn of a request to claim its key, or to replay.
pub(super) struct Turn {
    present: Present,
    _permit: OwnedSemaphorePermit,
}

/// While this value lives, duplicates of its request are refused or delayed.
pub(super) struct Registered {
    present: Present,
    _ended: watch::Sender<()>,
}

/// How long a request waits.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// For another request with its key.
    pub(super) first: Instant,
    /// For its turn, and for its place. Not earlier than `first`.
    pub(super) place: Instant,
}

impl LocalInFlight {
    /// Returns at the turn of a request: no request of this process performs the key, and fewer than `most` others have
    /// their turn. The order of the turns is that of the arrivals.
    pub(super) async fn turn(
        &self,
        key: &Key,
        asked: Fingerprint,
        most: usize,
        patience: Patience,
    ) -> Result<Turn, Error> {
        let (present, turns) = self.arrive(key, most);
        loop {
            self.until_free(key, asked, patience.first).await?;
            let turn = timeout_at(patience.place, turns.clone().acquire_owned()).await;
            // Others with the key are still waiting for the first request, or for the database.
            let Ok(Ok(permit)) = turn else { return Err(Error::InFlight { retry_after: RETRY_AFTER }) };
            // A request may have begun to perform during the wait for the turn.
            if self.performing(key).is_none() {
                return Ok(Turn { present, _permit: permit });
            }
        }
    }

    /// Returns once no request of this process performs the key. Waits for such a request until the deadline.
    async fn until_free(&self, key: &Key, asked: Fingerprint, deadline: Instant) -> Result<(), Error> {
        while let Some((first, mut ended)) = self.performing(key) {
            if first != asked {
                return Err(Error::KeyReused { key: key.clone() });
            }
            // Nothing is ever sent: this returns when the sender is dropped.
            if timeout_at(deadline, ended.changed()).await.is_err() {
                return Err(Error::InFlight { retry_after: RETRY_AFTER });
            }
        }
        Ok(())
    }

    fn arrive(&self, key: &Key, most: usize) -> (Present, Arc<Semaphore>) {
        let mut keys = self.keys();
        let requests = keys.entry(key.clone()).or_insert_with(|| Requests {
            count: 0,
            performing: None,
            turns: Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))),
        });
        requests.count += 1;
        let turns = requests.turns.clone();
        drop(keys);
        (Present { local: self.clone(), key: key.clone() }, turns)
    }

    fn performing(&self, key: &Key) -> Option<(Fingerprint, watch::Receiver<()>)> {
        self.keys().get(key)?.performing.clone()
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<Key, Requests>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Registers a request that performs. Call it only after the claim is won, so that replays of one key do not wait
    /// for each other. The turn ends, and the next request finds this one.
    ///
    /// `None` if the key is registered already, by the owner of a lease that has lost it and has not noticed.
    pub(super) fn register(self, fingerprint: Fingerprint) -> Option<Registered> {
        let (ending, ended) = watch::channel(());
        {
            let mut keys = self.present.local.keys();
            let requests = keys.get_mut(&self.present.key).filter(|requests| requests.performing.is_none())?;
            requests.performing = Some((fingerprint, ended));
        }
        Some(Registered { present: self.present, _ended: ending })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // Before the sender is dropped, which wakes the duplicates.
        if let Some(requests) = self.present.local.keys().get_mut(&self.present.key) {
            requests.performing = None;
        }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let mut keys = self.local.keys();
        if let Some(requests) = keys.get_mut(&self.key) {
            requests.count -= 1;
            if requests.count == 0 {
                keys.remove(&self.key);
            }
        }
    }
}
