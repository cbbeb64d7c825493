//! What the proxy knows: the connections, and which message of a request is to be interrupted.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, oneshot};

use super::lane::{Lane, Step, Unit};
use super::text;

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
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) fired: Notify,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) lanes: HashMap<u64, Lane>,
    pub(super) connections: u64,
    pub(super) last_activity: Instant,
    pub(super) phase: Phase,
    /// What the service does by itself.
    pub(super) background: HashSet<String>,
    pub(super) occurrences: HashMap<String, usize>,
    pub(super) events: Vec<Event>,
    pub(super) trap: Option<Trap>,
    pub(super) held: Option<oneshot::Sender<Then>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nobody asks the service for anything: what it does is background.
    Learning,
    /// A request is under way: its messages are numbered.
    Numbering,
    Passing,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) enum Decision {
    Pass,
    Close,
    Hold(oneshot::Receiver<Then>),
}

impl State {
    /// What the service wants of the server next.
    pub(super) fn decide(&mut self, id: u64, step: &Step) -> Decision {
        let Some(lane) = self.lanes.get_mut(&id) else { return Decision::Pass };
        let learnt = self.background.contains(&step.shape);
        if self.phase == Phase::Learning {
            self.background.insert(step.shape.clone());
        } else if learnt && lane.unit != Unit::Foreground {
            // A job begins its transaction as a request does. The first statement that the job does not send shows
            // whose it is.
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
