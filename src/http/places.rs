//! The places of the runs, and the queues for these places.
//!
//! A request needs three places for its run: a place of its key until its handler runs, a place of its scope, and a
//! place of the layer. A request queues for its places in this order, so a storm of requests with one key, or of one
//! scope, waits in its own queue. While a request of this process runs its handler, the duplicates of this request have
//! no place and no connection. While another process runs the handler, the duplicates in this process poll the
//! database, and have no place between two polls. The database alone decides which request runs its handler.
//!
//! A request queues in the task of its run. The runtime polls this task even if an outer service does not poll the
//! request. So a queue never waits for a request that is not polled.

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

/// Counts the runs of a layer. Get this counter from [`IdempotencyLayer::runs`](super::IdempotencyLayer::runs), and
/// wait for [`finished`](Self::finished) at the end of a graceful shutdown.
#[derive(Clone, Debug, Default)]
pub struct Runs(Arc<watch::Sender<usize>>);

impl Runs {
    /// The number of runs in progress.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Waits until no run is in progress. Stop accepting requests before this call. Limit the call by a time-out that
    /// is shorter than your platform's grace period. If a run is cut off, it is rolled back, or its lease lapses.
    pub async fn finished(&self) {
        // The sender is in `self`, so the channel stays open.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

pub(super) struct Ticket {
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    pub(super) trace: Trace,
    /// The arrival of the request. A record that has expired at the arrival is ignored. A record that expires after the
    /// arrival still gives the answer.
    pub(super) arrived: std::time::Instant,
    /// The request as the claim stores it, so that a resumer can finish it.
    pub(super) stored: Option<Vec<u8>>,
}

#[derive(Clone, Copy)]
pub(super) struct Bounds {
    all: usize,
    of_one_scope: usize,
    /// For each key, the number of places for the requests that do not run their handler.
    of_one_key: usize,
}

impl Bounds {
    /// If the service sets no number, one scope has seven eighths of the `at_once` runs that can work at a time.
    pub(super) fn of(all: usize, of_one_scope: Option<usize>, at_once: usize, connections: usize) -> Self {
        // If there are two runs or more, at least one is left to other scopes. A scope always gets at least one run.
        let of_one_scope = of_one_scope.unwrap_or_else(|| (at_once - at_once.div_ceil(8)).max(1));
        // If the scope has two places or more, at least half of them are left to its other keys.
        Self { all, of_one_scope, of_one_key: connections.min(of_one_scope / 2).max(1) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// The end of the wait for another request with the same key.
    pub(super) first: Instant,
    /// The end of the wait for the places of the request. This time is not earlier than `first`.
    pub(super) place: Instant,
}

#[derive(Clone, Default)]
pub(super) struct Places {
    runs: Runs,
    queues: Arc<Mutex<HashMap<Of, Queue>>>,
}

/// The requests that share a queue. A clone of the layer with other bounds has its own queues for scopes and for all
/// requests.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Of {
    All(usize),
    /// A scope, or `None` for all requests without a key.
    Scope(Option<String>, usize),
    Key(Key),
    /// The requests of one scope and operation that resumers of this process send.
    Resumed(String, String),
}

struct Queue {
    /// The number of requests that wait in this queue, or have a place of this queue.
    requests: usize,
    places: Arc<Semaphore>,
    /// The request that holds the key, if this queue is the queue of a key.
    holder: Option<Holder>,
}

/// The request that holds a key, as far as this process knows.
#[derive(Clone)]
enum Holder {
    /// A request of this process runs its handler. The channel closes when that request has ended.
    Here(Fingerprint, watch::Receiver<()>),
    /// A poll has found the key in flight. Before this time, a duplicate of this process polls again only at the end of
    /// its own wait.
    Elsewhere(Instant),
}

/// A request in a queue. A request with a permit has a place.
struct Queued {
    places: Places,
    of: Of,
    semaphore: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
}

pub(super) struct Place<'t> {
    places: Places,
    bounds: Bounds,
    /// The ticket of the request, or `None` if the request has no key.
    ticket: Option<&'t Ticket>,
    /// The place among the requests with the same key, until the handler of this request runs.
    of_key: Option<Queued>,
    run: Option<Run>,
    patience: Patience,
    pauses: Pauses,
    /// The channel that closes when the client has gone.
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

    /// Waits for the places of a request. The channel `client` closes when the client has gone.
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

    /// Takes the places of a request that a resumer is about to send. Returns `None` if a place is not free. One of
    /// these places is free only if no resumer of this process sends a request of the same operation and scope.
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
            // A resumed request does not overtake other requests, because no place is free while requests wait in the
            // queue.
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
    /// Takes all places of the request, unless the client hangs up first.
    async fn take(&mut self, deadline: Instant) -> Result<(), Rejection> {
        let mut client = self.client.clone();
        // The channel has no messages, so this future ends when the sender is dropped.
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

    /// Makes this request the holder of its key, because its handler runs from now on. The other requests with this key
    /// then find the holder, and the place of this request among them becomes free. Call this function only after the
    /// claim is won. Otherwise replays of one key would wait for each other.
    ///
    /// Returns `None` if another request of this process holds the key. That request has lost its lease without
    /// noticing.
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
    /// Gives the places back, so that the request holds no place during a pause. Until the end of the pause, another
    /// request with the key polls only at the end of its own wait.
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
        // If the request gets no place for its next poll in time, the key counts as in flight.
        self.take(self.patience.first).await.is_ok()
    }
}

impl Queued {
    /// Waits until the request has a place among the requests with this key, and this process knows no holder of the
    /// key.
    async fn turn(&mut self, ticket: &Ticket, first: Instant, deadline: Instant) -> Result<(), Error> {
        loop {
            let holder = self.holder_until(first);
            if holder.is_some() {
                // A holder appeared while this request waited for its place, so the request gives the place back.
                self.permit = None;
            }
            match holder {
                Some(Holder::Here(performed, _)) if performed != ticket.fingerprint => {
                    return Err(Error::KeyReused { key: ticket.key.clone() });
                }
                Some(Holder::Here(_, mut ended)) => {
                    // The channel has no messages, so this call returns when the sender is dropped.
                    if timeout_at(first, ended.changed()).await.is_err() {
                        return Err(Error::InFlight { retry_after: RETRY_AFTER });
                    }
                }
                Some(Holder::Elsewhere(next)) => sleep_until(next).await,
                None if self.permit.is_some() => return Ok(()),
                // If no place becomes free before the deadline, the key counts as in flight, because other requests
                // with the key still wait for the first request, or for the database.
                None => self.admitted(deadline).await.ok_or(Error::InFlight { retry_after: RETRY_AFTER })?,
            }
        }
    }

    /// Returns the holder of the key, if this process knows the holder. For a holder in another process, the returned
    /// time is the time of the next poll, or `first` if that is earlier. From this time on, the holder counts as
    /// unknown, so no request waits for the next poll beyond `first`.
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

    /// Waits for a place, in the order of arrival. Returns `None` after the deadline.
    async fn admitted(&mut self, deadline: Instant) -> Option<()> {
        self.permit = timeout_at(deadline, self.semaphore.clone().acquire_owned()).await.ok()?.ok();
        self.permit.as_ref().map(drop)
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        // The permit is given back before the queue is removed. Otherwise a new queue could give this place to another
        // request while this permit is still taken.
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
        // The holder is removed before the sender is dropped, because this drop wakes the duplicates.
        self.of_key.with_holder(|holder| *holder = None);
    }
}
