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

/// Shorter than this, a silence may be the service thinking.
const QUIET: Duration = Duration::from_millis(60);
/// How often a silence is looked for.
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

    /// Watches the idle service for so long. What it does now is background from now on.
    pub(crate) async fn learn(&self, watch: Duration) {
        self.shared.lock().phase = Phase::Learning;
        sleep(watch).await;
        self.shared.lock().phase = Phase::Passing;
    }

    pub(crate) fn background(&self) -> usize {
        self.shared.lock().background.len()
    }

    /// Numbers the messages from now on, and interrupts the one that the trap describes.
    pub(crate) fn number(&self, trap: Option<Trap>) {
        let mut state = self.shared.lock();
        state.phase = Phase::Numbering;
        state.occurrences.clear();
        state.events.clear();
        state.held = None;
        state.trap = trap;
    }

    /// Adds to the story.
    pub(crate) fn say(&self, what: impl Into<String>) {
        self.shared.lock().events.push(Event::Said(what.into()));
    }

    /// Ends the numbering.
    pub(crate) fn finish(&self) -> Vec<Event> {
        let mut state = self.shared.lock();
        state.phase = Phase::Passing;
        state.trap = None;
        std::mem::take(&mut state.events)
    }

    /// Waits until the trap has caught its message.
    pub(crate) async fn fired(&self) {
        loop {
            // Registered before the look, so that a trap that fires in between wakes it.
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
            // If the connection is gone, so is the message.
            let _ = held.send(then);
        }
    }

    /// Waits until no request is at work in the database: no message is unanswered, and no transaction is open. Returns
    /// whether that came to pass.
    pub(crate) async fn settle(&self, patience: Duration) -> bool {
        self.until(patience, |state| {
            let foreground = |lane: &&Lane| lane.unit != Unit::Background;
            state.last_activity.elapsed() >= QUIET && state.lanes.values().filter(foreground).all(Lane::is_idle)
        })
        .await
    }

    /// Waits until something has happened since `since`, and then nothing for a while. Statements may be waiting.
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
