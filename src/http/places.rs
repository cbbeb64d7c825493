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
use std::mem::take;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::rejection::Rejection;
use crate::background::unless;
use crate::claim::RETRY_AFTER;
use crate::session::{Pauses, Polls};
use crate::{Error, Fingerprint, Key};

/// Counts the runs of a layer. Get this counter from [`IdempotencyLayer::runs`](super::IdempotencyLayer::runs), and
/// wait for [`finished`](Self::finished) at the end of a graceful shutdown.
#[derive(Clone, Debug, Default)]
pub struct Runs(Arc<Running>);

#[derive(Debug, Default)]
struct Running {
    count: AtomicUsize,
    /// Notifies when no run is in progress any more.
    ended: Notify,
}

impl Runs {
    /// The number of runs in progress.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count.load(Ordering::SeqCst)
    }

    /// Waits until no run is in progress. Stop accepting requests before this call. Limit the call by a time-out that
    /// is shorter than your platform's grace period. If a run is cut off, it is rolled back, or its lease lapses.
    pub async fn finished(&self) {
        loop {
            // The wait begins before the count is read. Otherwise the wait could miss the end of the last run.
            let ended = self.0.ended.notified();
            if self.count() == 0 {
                return;
            }
            ended.await;
        }
    }
}

pub(super) struct Ticket {
    pub(super) key: Arc<Key>,
    pub(super) fingerprint: Fingerprint,
    /// The arrival of the request. A record that has expired at the arrival is ignored. A record that expires after the
    /// arrival still gives the answer.
    pub(super) arrived: std::time::Instant,
    /// The request as the claim stores it, so that a resumer can finish it.
    pub(super) stored: Option<Vec<u8>>,
}

#[derive(Clone, Copy)]
pub(super) struct Bounds {
    all: usize,
    pub(super) of_one_scope: usize,
    /// For each key, the number of places for the requests that do not run their handler.
    of_one_key: usize,
}

impl Bounds {
    /// If the service sets no number, one scope has seven eighths of the `at_once` runs that can work at a time.
    pub(super) fn of(all: usize, of_one_scope: Option<usize>, at_once: usize, connections: usize) -> Self {
        let of_one_scope = of_one_scope.unwrap_or_else(|| seven_eighths(at_once));
        Self { all, of_one_scope, of_one_key: seven_eighths(of_one_scope).min(connections.max(1)) }
    }
}

/// If there are two places or more, at least one is left to others. At least one place is taken.
fn seven_eighths(places: usize) -> usize {
    (places - places.div_ceil(8)).max(1)
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
    queues: Queues,
}

type Queues = Arc<Mutex<HashMap<Of, Arc<Queue>>>>;

/// The requests that share a queue. A clone of the layer with other bounds has its own queues for scopes and for all
/// requests.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Of {
    All(usize),
    /// A scope, or `None` for all requests without a key.
    Scope(Option<Arc<str>>, usize),
    Key(Arc<Key>),
    /// The requests of one scope and operation that resumers of this process send.
    Resumed(Arc<str>, Arc<str>),
}

struct Queue {
    /// The number of requests that wait in this queue, or have a place of this queue. The number changes only under the
    /// lock of the queues, so that no request joins a queue that is being removed.
    requests: AtomicUsize,
    places: Semaphore,
    /// The request that holds the key, if this queue is the queue of a key.
    holder: Mutex<Option<Holder>>,
    /// Notifies when a request of this process that held the key has ended.
    ended: Notify,
}

/// The request that holds a key, as far as this process knows.
#[derive(Clone, Copy)]
enum Holder {
    /// A request of this process runs its handler.
    Here(Fingerprint),
    /// A poll has found the key in flight. Before this time, a duplicate of this process polls again only at the end of
    /// its own wait.
    Elsewhere(Instant),
}

/// A request in a queue.
struct Queued {
    queues: Queues,
    of: Of,
    queue: Arc<Queue>,
    has_place: bool,
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
    /// The channel that closes when the client hangs up. `None` if the client has gone.
    client: Option<oneshot::Receiver<()>>,
}

pub(super) struct Run {
    runs: Runs,
    _places: Vec<Queued>,
}

/// While this value lives, duplicates of its request are refused or delayed.
pub(super) struct Performing {
    of_key: Queued,
}

impl Places {
    pub(super) fn runs(&self) -> Runs {
        self.runs.clone()
    }

    /// Waits for the places of a request. The channel `client` closes when the client hangs up.
    pub(super) async fn place<'t>(
        &self,
        bounds: Bounds,
        ticket: Option<&'t Ticket>,
        patience: Patience,
        client: oneshot::Receiver<()>,
    ) -> Result<Place<'t>, Rejection> {
        let of_key = ticket.map(|ticket| self.queue(Of::Key(ticket.key.clone()), bounds.of_one_key));
        let pauses = Pauses::default();
        let (places, client) = (self.clone(), Some(client));
        let mut place = Place { places, bounds, ticket, of_key, run: None, patience, pauses, client };
        place.take(patience.place).await?;
        Ok(place)
    }

    /// Takes the places that a request needs before a resumer can send it. Returns `None` if a place is not free. One
    /// of these places is free only if no resumer of this process sends a request of the same operation and scope.
    pub(super) fn resumed(&self, key: &Key, bounds: Bounds) -> Option<Run> {
        let Bounds { all, of_one_scope, .. } = bounds;
        let scope: Arc<str> = key.scope().into();
        let places = [
            (Of::Resumed(scope.clone(), key.operation().into()), 1),
            (Of::Scope(Some(scope), of_one_scope), of_one_scope),
            (Of::All(all), all),
        ];
        let taken = places.into_iter().map(|(of, most)| {
            let mut queued = self.queue(of, most);
            // A resumed request does not overtake other requests, because no place is free while requests wait in the
            // queue.
            queued.queue.places.try_acquire().ok()?.forget();
            queued.has_place = true;
            Some(queued)
        });
        Some(Run::counted(self.runs(), taken.collect::<Option<_>>()?))
    }

    fn queue(&self, of: Of, most: usize) -> Queued {
        let mut queues = locked(&self.queues);
        let queue = queues.entry(of.clone()).or_insert_with(|| {
            Arc::new(Queue {
                requests: AtomicUsize::new(0),
                places: Semaphore::new(most.min(Semaphore::MAX_PERMITS)),
                holder: Mutex::default(),
                ended: Notify::new(),
            })
        });
        queue.requests.fetch_add(1, Ordering::Relaxed);
        let queue = queue.clone();
        drop(queues);
        Queued { queues: self.queues.clone(), of, queue, has_place: false }
    }
}

impl Queue {
    /// Notes the holder of the key. Returns `false` if a request of this process already holds the key.
    fn hold(&self, by: Holder) -> bool {
        let mut holder = locked(&self.holder);
        let is_free = !matches!(*holder, Some(Holder::Here(_)));
        if is_free {
            *holder = Some(by);
        }
        is_free
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Place<'_> {
    /// Takes all places of the request, unless the client hangs up first. After a drop of this future, the request
    /// counts as one whose client has gone.
    async fn take(&mut self, deadline: Instant) -> Result<(), Rejection> {
        let mut client = self.client.take();
        let taken = match &mut client {
            Some(client) => unless(client, pin!(self.wait(deadline))).await,
            None => None,
        };
        // If the client has gone, this error is never read.
        let taken = taken.ok_or_else(|| Rejection::of(Error::Unanswered))?;
        self.client = client;
        taken
    }

    async fn wait(&mut self, deadline: Instant) -> Result<(), Rejection> {
        if let (Some(ticket), Some(of_key)) = (self.ticket, &mut self.of_key) {
            of_key.turn(ticket, self.patience.first, deadline).await.map_err(Rejection::of)?;
        }
        let Bounds { all, of_one_scope, .. } = self.bounds;
        let scope = self.ticket.map(|ticket| ticket.key.scope().into());
        let mut of_scope = self.places.queue(Of::Scope(scope, of_one_scope), of_one_scope);
        let mut of_all = self.places.queue(Of::All(all), all);
        if of_scope.admitted(deadline).await.is_none() {
            // If the layer is full, too, the other requests of the scope may only wait for a place of the layer.
            return Err(if of_all.queue.places.available_permits() == 0 {
                Rejection::Overloaded { limit: all }
            } else {
                Rejection::TooManyRequests { limit: of_one_scope }
            });
        }
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
        let performs = of_key.queue.hold(Holder::Here(ticket.fingerprint));
        of_key.give_back();
        performs.then(|| Performing { of_key })
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
        of_key.queue.hold(Holder::Elsewhere(next));
        of_key.give_back();
        // If the request gets no place for its next poll in time, the key counts as in flight.
        self.take(self.patience.first).await.is_ok()
    }
}

impl Queued {
    /// Waits until the request has a place among the requests with this key, and this process knows no holder of the
    /// key.
    async fn turn(&mut self, ticket: &Ticket, first: Instant, deadline: Instant) -> Result<(), Error> {
        let queue = self.queue.clone();
        loop {
            // The wait begins before the holder is read. Otherwise the wait could miss the end of that holder.
            let ended = queue.ended.notified();
            let holder = self.holder_until(first);
            if holder.is_some() {
                // A holder appeared while this request waited for its place, so the request gives the place back.
                self.give_back();
            }
            match holder {
                Some(Holder::Here(performed)) if performed != ticket.fingerprint => {
                    return Err(Error::KeyReused { key: Key::clone(&ticket.key) });
                }
                Some(Holder::Here(_)) => {
                    if timeout_at(first, ended).await.is_err() {
                        return Err(Error::InFlight { retry_after: RETRY_AFTER });
                    }
                }
                Some(Holder::Elsewhere(next)) => sleep_until(next).await,
                None if self.has_place => return Ok(()),
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
        match *locked(&self.queue.holder) {
            Some(Holder::Elsewhere(next)) => {
                let next = next.min(first);
                (Instant::now() < next).then_some(Holder::Elsewhere(next))
            }
            holder => holder,
        }
    }

    /// Waits for a place, in the order of arrival. Returns `None` after the deadline.
    async fn admitted(&mut self, deadline: Instant) -> Option<()> {
        timeout_at(deadline, self.queue.places.acquire()).await.ok()?.ok()?.forget();
        self.has_place = true;
        Some(())
    }

    fn give_back(&mut self) {
        if take(&mut self.has_place) {
            self.queue.places.add_permits(1);
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.give_back();
        let mut queues = locked(&self.queues);
        if self.queue.requests.fetch_sub(1, Ordering::Relaxed) == 1 {
            queues.remove(&self.of);
        }
    }
}

impl Run {
    fn counted(runs: Runs, places: Vec<Queued>) -> Self {
        runs.0.count.fetch_add(1, Ordering::SeqCst);
        Self { runs, _places: places }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.runs.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.runs.0.ended.notify_waiters();
        }
    }
}

impl Drop for Performing {
    fn drop(&mut self) {
        *locked(&self.of_key.queue.holder) = None;
        self.of_key.queue.ended.notify_waiters();
    }
}

#[cfg(test)]
#[path = "../../tests/unit/http/places.rs"]
mod tests;
