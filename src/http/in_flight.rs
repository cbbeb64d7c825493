//! The requests that this very process is performing.
//!
//! A duplicate of one of them needs no connection to be told so, which matters most when there is none: a storm of duplicates
//! stays out of the pool. It is only ever told to wait or to go; who performs is for the database to decide.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::request::Ticket;
use crate::claim::RETRY_AFTER;
use crate::{Error, Fingerprint, InFlight, Key};

type Keys = Mutex<HashMap<Key, Performing>>;

/// Shared by a layer and its clones.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlightHere {
    keys: Arc<Keys>,
}

#[derive(Clone, Debug)]
struct Performing {
    fingerprint: Fingerprint,
    /// Closed when the request is done with.
    ended: watch::Receiver<()>,
}

/// While this lives, duplicates are told so.
pub(super) struct Place {
    keys: Arc<Keys>,
    key: Key,
    _ending: watch::Sender<()>,
}

impl InFlightHere {
    /// Passes a request that is no duplicate of one here, after waiting for the other as far as `in_flight` says. Gives what
    /// is left of that wait.
    pub(super) async fn pass(&self, ticket: &Ticket, in_flight: InFlight) -> Result<InFlight, Error> {
        let give_up_at = match in_flight {
            InFlight::Reject => None,
            InFlight::Wait(limit) => Some(Instant::now() + limit),
        };
        while let Some(mut other) = self.find(&ticket.key) {
            if other.fingerprint != ticket.fingerprint {
                return Err(Error::KeyReused { key: ticket.key.clone() });
            }
            let ended = match give_up_at {
                None => false,
                // Nothing is ever sent: this ends when the sender is dropped.
                Some(at) => timeout_at(at, other.ended.changed()).await.is_ok(),
            };
            if !ended {
                return Err(Error::InFlight { retry_after: RETRY_AFTER });
            }
        }
        Ok(match give_up_at.map(|at| at.saturating_duration_since(Instant::now())) {
            None | Some(Duration::ZERO) => InFlight::Reject,
            Some(left) => InFlight::Wait(left),
        })
    }

    fn find(&self, key: &Key) -> Option<Performing> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Has it known that a request performs. Not before its claim is won: replays of one key do not wait for each other.
    ///
    /// `None` where the place is taken, by the owner of a lease who has lost it and does not know yet.
    pub(super) fn perform(&self, ticket: &Ticket) -> Option<Place> {
        match self.keys.lock().unwrap_or_else(PoisonError::into_inner).entry(ticket.key.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                let (ending, ended) = watch::channel(());
                vacant.insert(Performing { fingerprint: ticket.fingerprint, ended });
                Some(Place { keys: self.keys.clone(), key: ticket.key.clone(), _ending: ending })
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Before the sender is dropped, which wakes those who wait.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}
