//! The requests that this process is performing.
//!
//! A duplicate of such a request is refused or delayed without a connection. A storm of duplicates therefore stays out
//! of the pool. The database alone decides which request performs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::claim::RETRY_AFTER;
use crate::{Error, Fingerprint, InFlight, Key};

/// For each key the fingerprint of its request, and a channel that closes when the request has ended.
type Keys = Mutex<HashMap<Key, (Fingerprint, watch::Receiver<()>)>>;

/// Shared by a layer and its clones.
#[derive(Clone, Debug, Default)]
pub(super) struct LocalInFlight {
    keys: Arc<Keys>,
}

/// While this value lives, duplicates of its request are refused or delayed.
pub(super) struct Registered {
    keys: Arc<Keys>,
    key: Key,
    _ended: watch::Sender<()>,
}

impl LocalInFlight {
    /// Returns once no request of this process performs the key. Waits for such a request as long as `in_flight`
    /// allows, and returns the rest of that wait.
    pub(super) async fn until_free(
        &self,
        key: &Key,
        fingerprint: Fingerprint,
        in_flight: InFlight,
    ) -> Result<InFlight, Error> {
        let deadline = match in_flight {
            InFlight::Reject => None,
            InFlight::Wait(limit) => Some(Instant::now() + limit),
        };
        while let Some((first, mut ended)) = self.find(key) {
            if first != fingerprint {
                return Err(Error::KeyReused { key: key.clone() });
            }
            let has_ended = match deadline {
                None => false,
                // Nothing is ever sent: this returns when the sender is dropped.
                Some(at) => timeout_at(at, ended.changed()).await.is_ok(),
            };
            if !has_ended {
                return Err(Error::InFlight { retry_after: RETRY_AFTER });
            }
        }
        Ok(match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
            None | Some(Duration::ZERO) => InFlight::Reject,
            Some(left) => InFlight::Wait(left),
        })
    }

    fn find(&self, key: &Key) -> Option<(Fingerprint, watch::Receiver<()>)> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Registers a request that performs. Call it only after the claim is won, so that replays of one key do not wait
    /// for each other.
    ///
    /// `None` if the key is registered already, by the owner of a lease that has lost it and has not noticed.
    pub(super) fn register(&self, key: &Key, fingerprint: Fingerprint) -> Option<Registered> {
        match self.keys.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                let (ending, ended) = watch::channel(());
                vacant.insert((fingerprint, ended));
                Some(Registered { keys: self.keys.clone(), key: key.clone(), _ended: ending })
            }
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // Removed before the sender is dropped, which wakes the duplicates.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}
