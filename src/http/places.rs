//! The places of the runs, and the queues for these places.
//!
//! A request of a client needs three places for its run: a place of its key until its handler runs, a place of its
//! scope, and a place of the layer. A request queues for its places in this order, so a storm of requests with one key,
//! or of one scope, waits in its own queue. While a request of this process runs its handler, the duplicates of this
//! request have no place and no connection. While another process runs the handler, the duplicates in this process poll
//! the database, and have no place between two polls. Only the database permits a request to run its handler. This
//! process can only refuse or delay the request.
//!
//! A request queues in the task of its run. The runtime polls this task even if an outer service does not poll the
//! request. So a queue never waits for a request that is not polled.

use std::collections::HashMap;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::rejection::Rejection;
use super::request::Ticket;
use crate::background::unless;
use crate::claim::RETRY_AFTER;
use crate::fingerprint::Comparison;
use crate::session::{Pauses, Polls};
use crate::{Error, Fingerprint, Key};

/// Counts the runs of a layer. Get this counter from [`IdempotencyLayer::runs`](super::IdempotencyLayer::runs), and
/// wait for [`finished`](Self::finished) at the end of a graceful shutdown.
#[derive(Clone, Default)]
pub struct Runs {
    count: watch::Sender<usize>,
    queues: Queues,
}

impl Runs {
    /// The number of runs in progress.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.count.borrow()
    }

    /// Waits until no run is in progress. Stop accepting requests before this call. Limit the call by a time-out that
    /// is shorter than your platform's grace period. If a run is cut off, it is rolled back, or its lease lapses.
    pub async fn finished(&self) {
        // The channel is open, because `self` has a sender.
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Waits until the request may begin its run. The channel `client` closes when the client hangs up.
    pub(super) async fn turn<'t>(
        &self,
        bounds: Bounds,
        ticket: Option<&'t Ticket>,
        client: oneshot::Receiver<()>,
    ) -> Result<Turn<'t>, Rejection> {
        let arrived = Instant::now();
        let until_free = arrived + ticket.map_or(Duration::ZERO, |_| bounds.wait);
        let deadline = until_free.max(arrived + bounds.place_time);
        let mut turn = Turn {
            runs: self.clone(),
            bounds,
            keyed: ticket.map(|ticket| (ticket, self.queue(Sharers::Key(ticket.key.clone()), bounds.of_one_key))),
            until_free,
            holds_key: false,
            place_of_key: None,
            run: None,
            pauses: Pauses::default(),
            client: Some(client),
        };
        turn.begin_run(deadline).await?;
        Ok(turn)
    }

    /// Begins the run of a request that a resumer has found. Returns `None` if a place is not free. The first place
    /// exists once for each operation and scope, so a process resumes one request of each at a time.
    pub(super) fn begin_resumed(&self, key: &Key, bounds: Bounds) -> Option<Run> {
        let Bounds { all, of_one_scope, .. } = bounds;
        let scope: Arc<str> = key.scope().into();
        let shared = [
            (Sharers::Resumed(scope.clone(), key.operation().into()), 1),
            (Sharers::Scope(Some(scope), of_one_scope), of_one_scope),
            (Sharers::All(all), all),
        ];
        let places = shared.into_iter().map(|(sharers, most)| self.queue(sharers, most).free_place());
        Some(self.begin(places.collect::<Option<_>>()?))
    }

    fn begin(&self, places: Vec<Place>) -> Run {
        self.count.send_modify(|count| *count += 1);
        Run { count: self.count.clone(), _places: places }
    }

    fn queue(&self, sharers: Sharers, most: usize) -> Arc<Queue> {
        let mut queues = locked(&self.queues);
        if let Some(queue) = queues.get(&sharers).and_then(Weak::upgrade) {
            return queue;
        }
        let queue = Arc::new(Queue {
            sharers: sharers.clone(),
            queues: self.queues.clone(),
            places: Semaphore::new(most.min(Semaphore::MAX_PERMITS)),
            holder: watch::Sender::default(),
        });
        queues.insert(sharers, Arc::downgrade(&queue));
        queue
    }
}

impl fmt::Debug for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runs").field("count", &self.count()).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) all: usize,
    pub(super) of_one_scope: usize,
    /// For each key, the number of places for the requests that do not run their handler.
    pub(super) of_one_key: usize,
    /// The longest wait for another request with the same key.
    pub(super) wait: Duration,
    /// The longest wait for the places of a request. If `wait` is longer, a request with a key waits for `wait`.
    pub(super) place_time: Duration,
}

/// The requests that share a queue. A clone of the layer with other bounds has its own queues for scopes and for all
/// requests.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Sharers {
    All(usize),
    /// A scope, or `None` for all requests without a key.
    Scope(Option<Arc<str>>, usize),
    Key(Arc<Key>),
    /// The requests of one scope and operation that resumers of this process send.
    Resumed(Arc<str>, Arc<str>),
}

/// The queues of the sharers that have a request.
type Queues = Arc<Mutex<HashMap<Sharers, Weak<Queue>>>>;

/// A queue lives as long as a request waits in it, or has a place of it.
struct Queue {
    sharers: Sharers,
    queues: Queues,
    places: Semaphore,
    /// The request that holds the key, if this queue is the queue of a key.
    holder: watch::Sender<Option<Holder>>,
}

/// The request that holds a key, as far as this process knows.
#[derive(Clone, Copy)]
enum Holder {
    /// A request of this process runs its handler.
    Here(Fingerprint),
    /// A poll has found the key in flight. Before this time, a duplicate of this process sleeps. If its own wait ends
    /// earlier, the duplicate polls once more then.
    Elsewhere(Instant),
}

impl Queue {
    /// Waits for a place, in the order of arrival. Returns `None` after the deadline.
    async fn place(self: &Arc<Self>, deadline: Instant) -> Option<Place> {
        timeout_at(deadline, self.places.acquire()).await.ok()?.ok()?.forget();
        Some(Place(self.clone()))
    }

    /// Returns a place if one is free. No place is free while requests wait in the queue, so no request is overtaken.
    fn free_place(self: &Arc<Self>) -> Option<Place> {
        self.places.try_acquire().ok()?.forget();
        Some(Place(self.clone()))
    }

    /// Waits for a place among the requests with this key. While another request of this process holds the key, this
    /// request waits until the turn of the holder ends, but at most until `until_free`. The error is the answer to this
    /// request.
    async fn place_of_key(
        self: &Arc<Self>,
        ticket: &Ticket,
        until_free: Instant,
        deadline: Instant,
    ) -> Result<Place, Error> {
        let in_flight = || Error::InFlight { retry_after: RETRY_AFTER };
        let mut holders = self.holder.subscribe();
        let mut place = None;
        loop {
            let holder = *holders.borrow_and_update();
            match holder {
                // A holder may appear while this request waits for its place, so the request gives the place back.
                Some(Holder::Here(performed)) => {
                    place = None;
                    if ticket.fingerprint.compare(performed.as_bytes()) == Comparison::Other {
                        return Err(Error::KeyReused { key: Key::clone(&ticket.key) });
                    }
                    timeout_at(until_free, holders.changed()).await.map_or_else(|_| Err(in_flight()), |_| Ok(()))?;
                }
                // At the end of its own wait, the request polls once more, even if the holder's time has not come.
                Some(Holder::Elsewhere(next)) if Instant::now() < next.min(until_free) => {
                    place = None;
                    sleep_until(next.min(until_free)).await;
                }
                None | Some(Holder::Elsewhere(_)) => match place.take() {
                    Some(place) => return Ok(place),
                    // If no place becomes free before the deadline, the key counts as in flight, because other requests
                    // with the key still wait for the first request, or for the database.
                    None => place = Some(self.place(deadline).await.ok_or_else(in_flight)?),
                },
            }
        }
    }

    /// Notes the holder of the key. Returns `false` if a request of this process already holds the key.
    fn hold(&self, by: Holder) -> bool {
        self.holder.send_if_modified(|holder| {
            let is_free = !matches!(holder, Some(Holder::Here(_)));
            if is_free {
                *holder = Some(by);
            }
            is_free
        })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let mut queues = locked(&self.queues);
        // These sharers may already have their next queue.
        if queues.get(&self.sharers).is_some_and(|queue| queue.strong_count() == 0) {
            queues.remove(&self.sharers);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the places of a queue. The place is free again after the drop.
struct Place(Arc<Queue>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.places.add_permits(1);
    }
}

/// A run that counts, with its places of a scope and of the layer.
pub(super) struct Run {
    count: watch::Sender<usize>,
    _places: Vec<Place>,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.count.send_modify(|count| *count -= 1);
    }
}

/// The turn of a request: its run, and the pauses of this run between two polls.
pub(super) struct Turn<'t> {
    runs: Runs,
    bounds: Bounds,
    /// The ticket, and the queue of the requests with the same key. `None` if the request has no key.
    keyed: Option<(&'t Ticket, Arc<Queue>)>,
    /// The end of the wait for another request with the same key.
    until_free: Instant,
    holds_key: bool,
    /// The place among the requests with the same key, until the handler of this request runs.
    place_of_key: Option<Place>,
    run: Option<Run>,
    pauses: Pauses,
    /// The channel that closes when the client hangs up. `None` if the client has gone.
    client: Option<oneshot::Receiver<()>>,
}

impl Turn<'_> {
    /// Takes all places of the request, unless the client hangs up first. After a drop of this future, the request
    /// counts as one whose client has gone.
    async fn begin_run(&mut self, deadline: Instant) -> Result<(), Rejection> {
        let mut client = self.client.take();
        let begun = match &mut client {
            Some(client) => unless(client, pin!(self.take_places(deadline))).await,
            None => None,
        };
        // This error stands for a client that has gone. No client gets this error, and a caller only learns that the
        // request has no run.
        let begun = begun.ok_or_else(|| Rejection::of(Error::Unanswered))?;
        self.client = client;
        begun
    }

    async fn take_places(&mut self, deadline: Instant) -> Result<(), Rejection> {
        if let Some((ticket, of_key)) = &self.keyed {
            let place = of_key.place_of_key(ticket, self.until_free, deadline).await;
            self.place_of_key = Some(place.map_err(Rejection::of)?);
        }
        let Bounds { all, of_one_scope, .. } = self.bounds;
        let scope = self.keyed.as_ref().map(|(ticket, _)| ticket.key.scope().into());
        let of_scope = self.runs.queue(Sharers::Scope(scope, of_one_scope), of_one_scope);
        let of_all = self.runs.queue(Sharers::All(all), all);
        let Some(place_of_scope) = of_scope.place(deadline).await else {
            // If the layer is full, too, perhaps all other requests of the scope only wait for a place of the layer.
            return Err(if of_all.places.available_permits() == 0 {
                Rejection::Overloaded { limit: all }
            } else {
                Rejection::TooManyRequests { limit: of_one_scope }
            });
        };
        let place_of_all = of_all.place(deadline).await.ok_or(Rejection::Overloaded { limit: all })?;
        self.run = Some(self.runs.begin(vec![place_of_scope, place_of_all]));
        Ok(())
    }

    /// Makes this request the holder of its key until the end of its turn, because its handler runs from now on. The
    /// duplicates in this process are then refused or delayed, and the place of this request among them becomes free.
    /// Call this function only after the claim is won. Otherwise replays of one key would wait for each other.
    ///
    /// If another request of this process holds the key, that request has lost its lease without noticing, and stays
    /// the holder.
    pub(super) fn hold_key(&mut self) {
        let Some((ticket, of_key)) = &self.keyed else { return };
        self.holds_key = of_key.hold(Holder::Here(ticket.fingerprint));
        self.place_of_key = None;
    }
}

impl Polls for Turn<'_> {
    /// Gives the places back, so that the request holds no place during a pause. Until the end of the pause, the other
    /// requests with the key sleep, too, as [`Holder::Elsewhere`] describes.
    async fn pause(&mut self) -> bool {
        self.run = None;
        let now = Instant::now();
        let Some((_, of_key)) = self.keyed.as_ref().filter(|_| now < self.until_free) else { return false };
        let next = now + self.pauses.next();
        of_key.hold(Holder::Elsewhere(next));
        self.place_of_key = None;
        // If the request gets no place for its next poll in time, the key counts as in flight.
        self.begin_run(self.until_free).await.is_ok()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some((_, of_key)) = self.keyed.as_ref().filter(|_| self.holds_key) {
            of_key.holder.send_replace(None);
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/http/places.rs"]
mod tests;
