//! The requests that this process is performing.
//!
//! A duplicate of such a request is refused or delayed without a connection. A storm of duplicates therefore stays out
//! of the pool. The database alone decides which request performs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::claim::RETRY_AFTER;
use crate::{Error, Fingerprint, Key};

/// For each key the fingerprint of its request, and a channel that closes when the request has ended.
type Keys = HashMap<Key, (Fingerprint, watch::Receiver<()>)>;

/// Shared by a layer and its clones.
#[derive(Clone, Debug, Default)]
pub(super) struct LocalInFlight(Arc<Mutex<Keys>>);

/// No request of this process performs the key.
pub(super) enum Free {
    AtOnce,
    /// This request has waited for another one with the key, which has ended.
    AfterAWait,
}

/// While this value lives, duplicates of its request are refused or delayed.
pub(super) struct Registered {
    local: LocalInFlight,
    key: Key,
    _ended: watch::Sender<()>,
}

impl LocalInFlight {
    /// Returns once no request of this process performs the key. Waits for such a request until the deadline.
    pub(super) async fn until_free(&self, key: &Key, asked: Fingerprint, deadline: Instant) -> Result<Free, Error> {
        let mut free = Free::AtOnce;
        let find = || self.keys().get(key).cloned();
        while let Some((first, mut ended)) = find() {
            if first != asked {
                return Err(Error::KeyReused { key: key.clone() });
            }
            // Nothing is ever sent: this returns when the sender is dropped.
            if timeout_at(deadline, ended.changed()).await.is_err() {
                return Err(Error::InFlight { retry_after: RETRY_AFTER });
            }
            free = Free::AfterAWait;
        }
        Ok(free)
    }

    /// Registers a request that performs. Call it only after the claim is won, so that replays of one key do not wait
    /// for each other.
    ///
    /// `None` if the key is registered already, by the owner of a lease that has lost it and has not noticed.
    pub(super) fn register(&self, key: &Key, fingerprint: Fingerprint) -> Option<Registered> {
        let mut keys = self.keys();
        let Entry::Vacant(vacant) = keys.entry(key.clone()) else { return None };
        let (ending, ended) = watch::channel(());
        vacant.insert((fingerprint, ended));
        Some(Registered { local: self.clone(), key: key.clone(), _ended: ending })
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // Removed before the sender is dropped, which wakes the duplicates.
        self.local.keys().remove(&self.key);
    }
}
