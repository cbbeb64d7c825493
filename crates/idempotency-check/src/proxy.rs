//! The proxy between the service and its database: it numbers the messages of a request, and interrupts one of them.

mod connection;
mod lane;
mod state;
mod text;
mod upstream;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::wire::{Entrance, relay};
use connection::Connection;
use lane::{Lane, Unit};
use state::{Phase, Shared, State};

pub(crate) use state::{Cut, Event, Place, Then, Trap};
pub(crate) use text::shorten;
pub(crate) use upstream::{Trust, Upstream};

/// The shortest silence that counts as the end of a request's work. During a shorter silence, the service may be
/// computing.
const QUIET: Duration = Duration::from_millis(60);
/// The pause between two checks of the proxy's state.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    entrance: Entrance,
}

impl Proxy {
    pub(crate) async fn open(at: SocketAddr, upstream: Upstream) -> io::Result<Self> {
        let state = State {
            lanes: HashMap::new(),
            connections: 0,
            last_activity: Instant::now(),
            phase: Phase::Passing,
            background: HashSet::new(),
            occurrences: HashMap::new(),
            events: Vec::new(),
            trap: None,
            held: None,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), fired: Notify::new() });
        let upstream = Arc::new(upstream);
        let entrance = Entrance::tcp(at, {
            let shared = shared.clone();
            move |client| {
                let (shared, upstream) = (shared.clone(), upstream.clone());
                async move {
                    if let Ok(server) = upstream.connect().await {
                        let connection = Connection::new(shared, upstream.is_encrypted());
                        relay(client, server, &connection).await;
                    }
                }
            }
        })
        .await?;
        Ok(Self { shared, entrance })
    }

    pub(crate) fn port(&self) -> u16 {
        self.entrance.port()
    }

    /// Watches the idle service for this time. The statements that the service sends in this time count as background
    /// afterwards.
    pub(crate) async fn learn(&self, watch: Duration) {
        self.shared.lock().phase = Phase::Learning;
        sleep(watch).await;
        self.shared.lock().phase = Phase::Passing;
    }

    pub(crate) fn background(&self) -> usize {
        self.shared.lock().background.len()
    }

    /// Numbers the messages from now on, and interrupts the message that the trap describes.
    pub(crate) fn number(&self, trap: Option<Trap>) {
        let mut state = self.shared.lock();
        state.phase = Phase::Numbering;
        state.occurrences.clear();
        state.events.clear();
        state.held = None;
        state.trap = trap;
    }

    /// Adds a line to the story.
    pub(crate) fn say(&self, what: impl Into<String>) {
        self.shared.lock().events.push(Event::Said(what.into()));
    }

    /// Ends the numbering, and returns the events.
    pub(crate) fn finish(&self) -> Vec<Event> {
        let mut state = self.shared.lock();
        state.phase = Phase::Passing;
        state.trap = None;
        std::mem::take(&mut state.events)
    }

    /// Waits until the trap has caught its message.
    pub(crate) async fn fired(&self) {
        loop {
            // The wait is registered before the check, so a trap that fires between the check and the wait ends the
            // wait.
            let fired = self.shared.fired.notified();
            if self.has_fired() {
                return;
            }
            fired.await;
        }
    }

    pub(crate) fn has_fired(&self) -> bool {
        self.shared.lock().trap.is_none()
    }

    pub(crate) fn let_go(&self, then: Then) {
        if let Some(held) = self.shared.lock().held.take() {
            // If the connection is gone, the message is gone, too.
            let _ = held.send(then);
        }
    }

    /// Waits until no request is at work in the database: the server has answered every message, and no transaction is
    /// open. Returns `false` if the wait takes longer than `patience`.
    pub(crate) async fn settle(&self, patience: Duration) -> bool {
        self.until(patience, |state| {
            let foreground = |lane: &&Lane| lane.unit != Unit::Background;
            state.last_activity.elapsed() >= QUIET && state.lanes.values().filter(foreground).all(Lane::is_idle)
        })
        .await
    }

    /// Waits until a message was sent after `since`, and a silence followed. Statements may still be waiting in the
    /// database.
    pub(crate) async fn pause(&self, since: Instant, patience: Duration) {
        let quiet = |state: &State| state.last_activity > since && state.last_activity.elapsed() >= 2 * QUIET;
        self.until(patience, quiet).await;
    }

    async fn until(&self, patience: Duration, is_so: impl Fn(&State) -> bool) -> bool {
        let looking = async {
            while !is_so(&self.shared.lock()) {
                sleep(LOOK).await;
            }
        };
        timeout(patience, looking).await.is_ok()
    }
}

#[cfg(test)]
mod tests;
