use std::sync::Arc;
use std::time::Instant;

use crate::wire::{Flow, Message, Tap};

use super::lane::{Lane, Part, Unit};
use super::state::{Decision, Event, Phase, Shared, Then};
use super::upstream;

/// The tap of one connection.
pub(super) struct Connection {
    id: u64,
    shared: Arc<Shared>,
    /// Whether the connection to the server is encrypted. The connection to the service is never encrypted.
    is_encrypted: bool,
}

impl Connection {
    pub(super) fn new(shared: Arc<Shared>, is_encrypted: bool) -> Self {
        let id = {
            let mut state = shared.lock();
            state.connections += 1;
            let id = state.connections;
            state.lanes.insert(id, Lane::default());
            id
        };
        Self { id, shared, is_encrypted }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.lock().lanes.remove(&self.id);
    }
}

impl Tap for Connection {
    async fn up(&self, message: &mut Message) -> Flow {
        let decision = {
            let mut state = self.shared.lock();
            let Some(lane) = state.lanes.get_mut(&self.id) else { return Flow::Close };
            if lane.is_cut {
                return Flow::Swallow;
            }
            match lane.up(message) {
                Part::Apart => return Flow::Pass,
                Part::Begun => return Flow::Gather,
                Part::Complete(step) => {
                    let waiting = state.trap.is_some();
                    let decision = state.decide(self.id, &step);
                    if waiting && state.trap.is_none() {
                        self.shared.fired.notify_waiters();
                    }
                    decision
                }
            }
        };
        match decision {
            Decision::Pass => Flow::Pass,
            Decision::Close => Flow::Close,
            Decision::Hold(goes) => {
                if goes.await == Ok(Then::Orphan)
                    && let Some(lane) = self.shared.lock().lanes.get_mut(&self.id)
                {
                    lane.is_cut = true;
                }
                Flow::Pass
            }
        }
    }

    async fn down(&self, message: &mut Message) -> Flow {
        if self.is_encrypted {
            upstream::without_channel_binding(message);
        }
        let mut state = self.shared.lock();
        let Some(lane) = state.lanes.get_mut(&self.id) else { return Flow::Close };
        // `is_lost` and `is_background` are read before `lane.down`, because the last message of an answer also ends
        // the transaction and resets `unit`.
        let (is_lost, is_background) = (lane.is_lost(), lane.unit == Unit::Background);
        lane.down(message);
        let is_over = is_lost && lane.is_answered();
        if !is_background {
            state.last_activity = Instant::now();
        }
        if let (Phase::Numbering, Some(rejection)) = (state.phase, message.rejection()) {
            state.events.push(Event::Rejected(format!("{} {}", rejection.code, rejection.message)));
        }
        match (is_lost, is_over) {
            (_, true) => Flow::Close,
            (true, _) => Flow::Swallow,
            _ => Flow::Pass,
        }
    }
}
