//! The state of the proxy: the connections, and the message of a request that is to be interrupted.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, oneshot};

use super::lane::{Lane, Step, Unit};
use super::text;

/// The place of a message in a request. `occurrence` counts the messages of the request with the same `shape`. The
/// pair identifies the message in another run of the request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) shape: String,
    pub(crate) occurrence: usize,
}

/// An event of a try, which the report shows as a line of the try's story.
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
    /// The client or the check did something.
    Said(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Before,
    After,
    Hold,
}

/// How the proxy continues with a message that it has held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Pass,
    /// The process that sent the message was killed. The server executes the message, and the answer is discarded.
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
    /// The shapes of the statements that the service sends by itself.
    pub(super) background: HashSet<String>,
    pub(super) occurrences: HashMap<String, usize>,
    pub(super) events: Vec<Event>,
    pub(super) trap: Option<Trap>,
    pub(super) held: Option<oneshot::Sender<Then>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No request is sent, so each statement of the service is background.
    Learning,
    /// A request is in progress, and its messages are numbered.
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
    /// Decides about the next step of a connection.
    pub(super) fn decide(&mut self, id: u64, step: &Step) -> Decision {
        let Some(lane) = self.lanes.get_mut(&id) else { return Decision::Pass };
        let learnt = self.background.contains(&step.shape);
        if self.phase == Phase::Learning {
            self.background.insert(step.shape.clone());
        } else if learnt && lane.unit != Unit::Foreground {
            // A job and a request may begin their transactions with the same statement. The first statement that no
            // job sends shows that the transaction belongs to a request.
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
