//! The proxy between the service and its database: it numbers the messages of a request, and interrupts one of them.

mod connection;
mod lane;
mod text;
mod upstream;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use crate::wire::{Entrance, relay};
use connection::Connection;
use lane::{Lane, Step, Unit};

pub(crate) use text::shorten;
pub(crate) use upstream::{Trust, Upstream};

/// Shorter than this, a silence may be the service thinking.
const QUIET: Duration = Duration::from_millis(60);
/// How often a silence is looked for.
const LOOK: Duration = Duration::from_millis(5);

/// A message of a request. Its shape, and which one of this shape it is, find it again in another run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) shape: String,
    pub(crate) occurrence: usize,
}

/// What a story is made of.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Message {
        connection: u64,
        place: Place,
        sql: String,
        mark: &'static str,
    },
    /// The server rejected a statement.
    Rejected(String),
    /// The client, or the check, did something.
    Said(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Before,
    After,
    Hold,
}

/// What becomes of a message that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Pass,
    /// Its sender is dead: the server executes it, and nobody hears the answer.
    Orphan,
}

#[derive(Clone, Debug)]
pub(crate) struct Trap {
    pub(crate) place: Place,
    pub(crate) cut: Cut,
}

#[derive(Debug)]
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    entrance: Entrance,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    fired: Notify,
}

#[derive(Debug)]
struct State {
    lanes: HashMap<u64, Lane>,
    connections: u64,
    last_activity: Instant,
    phase: Phase,
    /// What the service does by itself.
    background: HashSet<String>,
    occurrences: HashMap<String, usize>,
    events: Vec<Event>,
    trap: Option<Trap>,
    held: Option<oneshot::Sender<Then>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nobody asks the service for anything: what it does is background.
    Learning,
    /// A request is under way: its messages are numbered.
    Numbering,
    Passing,
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Decision {
    Pass,
    Close,
    Hold(oneshot::Receiver<Then>),
}

impl State {
    /// What the service wants of the server next.
    fn decide(&mut self, id: u64, step: &Step) -> Decision {
        let Some(lane) = self.lanes.get_mut(&id) else { return Decision::Pass };
        let learnt = self.background.contains(&step.shape);
        if self.phase == Phase::Learning {
            self.background.insert(step.shape.clone());
        } else if learnt && lane.unit != Unit::Foreground {
            // A job begins its transaction as a request does. The first statement that the job does not send shows whose it is.
            lane.unit = Unit::Background;
        } else {
            lane.unit = Unit::Foreground;
        }
        if lane.unit != Unit::Background {
            self.last_activity = Instant::now();
        }
        lane.sent(step);
        if self.phase != Phase::Numbering || lane.unit != Unit::Foreground || text::pings(&step.shape) {
            return Decision::Pass;
        }
        let occurrence = self.occurrences.entry(step.shape.clone()).or_default();
        *occurrence += 1;
        let place = Place { shape: step.shape.clone(), occurrence: *occurrence };
        let cut = self.trap.take_if(|trap| trap.place == place).map(|trap| trap.cut);
        let mark = match cut {
            None => "",
            Some(Cut::Before) => "the connection is lost before the server receives this",
            Some(Cut::After) => "the server executes this, and the connection is lost before the answer",
            Some(Cut::Hold) => "this is held back",
        };
        self.events.push(Event::Message { connection: id, place, sql: step.sql.clone(), mark });
        match cut {
            None => Decision::Pass,
            Some(Cut::Before) => Decision::Close,
            Some(Cut::After) => {
                lane.is_cut = true;
                Decision::Pass
            }
            Some(Cut::Hold) => {
                let (held, goes) = oneshot::channel();
                self.held = Some(held);
                Decision::Hold(goes)
            }
        }
    }
}
