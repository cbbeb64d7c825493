//! The places of the runs, and the queues for them.
//!
//! A run has three places: of its key, of its scope and of the layer. A request queues for them in this order, so a
//! storm of one key, or of one scope, waits in its own queue. While a request of this process performs, its duplicates
//! have no place and no connection. While another process performs, its duplicates here poll, and have no place between
//! two polls. The database alone decides which request performs.
//!
//! A request queues in the task of its run. The runtime polls this task even if a service further out does not poll the
//! request, so a queue never waits for a request that is not polled.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::rejection::Rejection;
use crate::background::unless;
use crate::claim::RETRY_AFTER;
use crate::observe::Trace;
use crate::session::{Pauses, Polls};
use crate::{Error, Fingerprint, Key};

/// Counts the runs of a layer. Take it from [`IdempotencyLayer::runs`](super::IdempotencyLayer::runs), and wait for
/// [`finished`](Self::finished) at the end of a graceful shutdown.
#[derive(Clone, Debug, Default)]
pub struct Runs(Arc<watch::Sender<usize>>);

impl Runs {
    /// The number of runs in progress.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Waits until no run is in progress. Stop accepting requests first. Put a time-out around this that is shorter
    /// than your platform's grace period. A run that is cut off is rolled back, or its lease lapses.
    pub async fn finished(&self) {
        // The sender is in `self`, so the channel stays open.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

pub(super) struct Ticket {
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    pub(super) trace: Trace,
    /// A record is judged as of this moment.
    pub(super) arrived: std::time::Instant,
    /// The request as the claim stores it, so that a resumer can finish it.
    pub(super) stored: Option<Vec<u8>>,
}

#[derive(Clone, Copy)]
pub(super) struct Bounds {
    all: usize,
    of_one_scope: usize,
    /// For the requests with one key that do not perform.
    of_one_key: usize,
}

impl Bounds {
    /// Without a number from the service, one scope has seven eighths of the `at_once` runs that can work at a time.
    pub(super) fn of(all: usize, of_one_scope: Option<usize>, at_once: usize, connections: usize) -> Self {
        // Of two or more, at least one is left to other scopes. At least one is given.
        let of_one_scope = of_one_scope.unwrap_or_else(|| (at_once - at_once.div_ceil(8)).max(1));
        // At least half of the scope's places are left to its other keys, if it has two.
        Self { all, of_one_scope, of_one_key: connections.min(of_one_scope / 2).max(1) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// For another request with its key.
    pub(super) first: Instant,
    /// For its places. Not earlier than `first`.
    pub(super) place: Instant,
}

#[derive(Clone, Default)]
pub(super) struct Places {
    runs: Runs,
    queues: Arc<Mutex<HashMap<Of, Queue>>>,
}

/// The owner of a queue. Clones of a layer with another bound have queues of their own.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Of {
    All(usize),
    /// `None`: of the requests without a key.
    Scope(Option<String>, usize),
    Key(Key),
    /// The requests of one operation that resumers of this process send: `(scope, operation)`.
    Resumed(String, String),
}

struct Queue {
    /// How many requests wait here, or have a place of this queue.
    requests: usize,
    places: Arc<Semaphore>,
    /// Of a key.
    holder: Option<Holder>,
}

/// The request that holds a key, as far as this process knows.
#[derive(Clone)]
enum Holder {
    /// A request of this process performs. The channel closes when that request has ended.
    Here(Fingerprint, watch::Receiver<()>),
    /// A poll has found the key in flight. No duplicate polls again before this time.
    Elsewhere(Instant),
}

/// A request in a queue. With a permit, it has a place.
struct Queued {
    places: Places,
    of: Of,
    semaphore: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
}

pub(super) struct Place<'t> {
    places: Places,
    bounds: Bounds,
    /// `None`: the request has no key.
    ticket: Option<&'t Ticket>,
    /// The place among the requests with its key, until this one performs.
    of_key: Option<Queued>,
    run: Option<Run>,
    patience: Patience,
    pauses: Pauses,
    /// Closes when the client has gone.
    client: watch::Receiver<()>,
}

pub(super) struct Run {
    runs: Runs,
    _places: Vec<Queued>,
}

/// While this value lives, duplicates of its request are refused or delayed.
pub(super) struct Performing {
    of_key: Queued,
    _ended: watch::Sender<()>,
}

impl Places {
    pub(super) fn runs(&self) -> Runs {
        self.runs.clone()
    }

    /// Waits for the places of a request. `client` closes when the client has gone.
    pub(super) async fn place<'t>(
        &self,
        bounds: Bounds,
        ticket: Option<&'t Ticket>,
        patience: Patience,
        client: watch::Receiver<()>,
    ) -> Result<Place<'t>, Rejection> {
        let of_key = ticket.map(|ticket| self.queue(Of::Key(ticket.key.clone()), bounds.of_one_key));
        let pauses = Pauses::default();
        let mut place = Place { places: self.clone(), bounds, ticket, of_key, run: None, patience, pauses, client };
        place.take(patience.place).await?;
        Ok(place)
    }

    /// Takes the places of a request that a resumer is about to send. `None` if one of them is not free, or if a
    /// resumer of this process already sends a request of this operation and scope.
    pub(super) fn resumed(&self, key: &Key, bounds: Bounds) -> Option<Run> {
        let Bounds { all, of_one_scope, .. } = bounds;
        let scope = key.scope().to_owned();
        let places = [
            (Of::Resumed(scope.clone(), key.operation().to_owned()), 1),
            (Of::Scope(Some(scope), of_one_scope), of_one_scope),
            (Of::All(all), all),
        ];
        let taken = places.into_iter().map(|(of, most)| {
            let mut queued = self.queue(of, most);
            // If others wait in the queue, no place is free, so this does not overtake them.
            queued.permit = Some(queued.semaphore.clone().try_acquire_owned().ok()?);
            Some(queued)
        });
        Some(Run::counted(self.runs(), taken.collect::<Option<_>>()?))
    }

    fn queue(&self, of: Of, most: usize) -> Queued {
        let mut queues = self.queues();
        let queue = queues.entry(of.clone()).or_insert_with(|| Queue {
            requests: 0,
            places: Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))),
            holder: None,
        });
        queue.requests += 1;
        let semaphore = queue.places.clone();
        drop(queues);
        Queued { places: self.clone(), of, semaphore, permit: None }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<Of, Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    /// Takes all places, unless the client goes first.
    async fn take(&mut self, deadline: Instant) -> Result<(), Rejection> {
        let mut client = self.client.clone();
        // Nothing is ever sent.
        let mut gone = pin!(async move { while client.changed().await.is_ok() {} });
        let taken = unless(&mut gone, self.wait(deadline)).await;
        // The client has gone, so this error is never read.
        taken.unwrap_or_else(|| Err(Rejection::of(Error::Unanswered)))
    }

    async fn wait(&mut self, deadline: Instant) -> Result<(), Rejection> {
        if let (Some(ticket), Some(of_key)) = (self.ticket, &mut self.of_key) {
            of_key.turn(ticket, self.patience.first, deadline).await.map_err(Rejection::of)?;
        }
        let Bounds { all, of_one_scope, .. } = self.bounds;
        let scope = self.ticket.map(|ticket| ticket.key.scope().to_owned());
        let mut of_scope = self.places.queue(Of::Scope(scope, of_one_scope), of_one_scope);
        of_scope.admitted(deadline).await.ok_or(Rejection::Overloaded { limit: of_one_scope })?;
        let mut of_all = self.places.queue(Of::All(all), all);
        of_all.admitted(deadline).await.ok_or(Rejection::Overloaded { limit: all })?;
        self.run = Some(Run::counted(self.places.runs(), vec![of_scope, of_all]));
        Ok(())
    }

    /// The request performs from now on: the other requests with this key find it, and its place among them is free.
    /// Call this only after the claim is won, or replays of one key would wait for each other.
    ///
    /// `None` if another request of this process performs. That one has lost its lease and has not noticed.
    pub(super) fn performing(&mut self) -> Option<Performing> {
        let (ticket, mut of_key) = (self.ticket?, self.of_key.take()?);
        let (ending, ended) = watch::channel(());
        let performs = of_key.with_holder(|holder| {
            let performs = !matches!(holder, Some(Holder::Here(..)));
            if performs {
                *holder = Some(Holder::Here(ticket.fingerprint, ended));
            }
            performs
        });
        of_key.permit = None;
        performs.then_some(Performing { of_key, _ended: ending })
    }
}

impl Polls for Place<'_> {
    /// Gives the places back, so that a pause holds none. Until the end of the pause, no other request with the key
    /// polls.
    async fn rest(&mut self) -> bool {
        self.run = None;
        let now = Instant::now();
        let Some(of_key) = self.of_key.as_mut().filter(|_| now < self.patience.first) else { return false };
        let next = now + self.pauses.next();
        of_key.with_holder(|holder| {
            if !matches!(holder, Some(Holder::Here(..))) {
                *holder = Some(Holder::Elsewhere(next));
            }
        });
        of_key.permit = None;
        // A poll that finds no place in time counts as one that finds the key in flight.
        self.take(self.patience.first).await.is_ok()
    }
}

impl Queued {
    /// Waits for a place among the requests with this key, and until this process knows of no holder of the key.
    async fn turn(&mut self, ticket: &Ticket, first: Instant, deadline: Instant) -> Result<(), Error> {
        loop {
            let holder = self.holder_until(first);
            if holder.is_some() {
                // The holder was found after the wait for the place.
                self.permit = None;
            }
            match holder {
                Some(Holder::Here(performed, _)) if performed != ticket.fingerprint => {
                    return Err(Error::KeyReused { key: ticket.key.clone() });
                }
                Some(Holder::Here(_, mut ended)) => {
                    // Nothing is ever sent: this returns when the sender is dropped.
                    if timeout_at(first, ended.changed()).await.is_err() {
                        return Err(Error::InFlight { retry_after: RETRY_AFTER });
                    }
                }
                Some(Holder::Elsewhere(next)) => sleep_until(next).await,
                None if self.permit.is_some() => return Ok(()),
                // After the deadline, other requests with the key still wait for the first request, or for the
                // database.
                None => self.admitted(deadline).await.ok_or(Error::InFlight { retry_after: RETRY_AFTER })?,
            }
        }
    }

    /// The holder of the key that this process knows. A request does not wait for the next poll beyond `first`.
    fn holder_until(&self, first: Instant) -> Option<Holder> {
        self.with_holder(|holder| match holder {
            Some(Holder::Elsewhere(next)) => {
                let next = (*next).min(first);
                (Instant::now() < next).then_some(Holder::Elsewhere(next))
            }
            holder => holder.clone(),
        })
    }

    fn with_holder<R>(&self, change: impl FnOnce(&mut Option<Holder>) -> R) -> R {
        // The queue exists while this value lives.
        change(self.places.queues().get_mut(&self.of).map_or(&mut None, |queue| &mut queue.holder))
    }

    /// Waits for a place, in the order of arrival. `None` after the deadline.
    async fn admitted(&mut self, deadline: Instant) -> Option<()> {
        self.permit = timeout_at(deadline, self.semaphore.clone().acquire_owned()).await.ok()?.ok();
        self.permit.as_ref().map(drop)
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        // Before the queue is removed, together with the count of its places.
        self.permit = None;
        let mut queues = self.places.queues();
        if let Some(queue) = queues.get_mut(&self.of) {
            queue.requests -= 1;
            if queue.requests == 0 {
                queues.remove(&self.of);
            }
        }
    }
}

impl Run {
    fn counted(runs: Runs, places: Vec<Queued>) -> Self {
        runs.0.send_modify(|count| *count += 1);
        Self { runs, _places: places }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.runs.0.send_modify(|count| *count -= 1);
    }
}

impl Drop for Performing {
    fn drop(&mut self) {
        // Before the sender is dropped, which wakes the duplicates.
        self.of_key.with_holder(|holder| *holder = None);
    }
}
