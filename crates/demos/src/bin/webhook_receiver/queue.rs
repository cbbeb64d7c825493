//! The sender's queue: what is planned, and what has to be delivered again.

use std::collections::VecDeque;
use std::time::Duration;
use std::vec;

use tokio::time::Instant;

pub(crate) struct Queue {
    planned: vec::IntoIter<usize>,
    /// Until when to wait, and for which event. In order, because all wait equally long or nearly so.
    again: VecDeque<(Instant, usize)>,
}

impl Queue {
    pub(crate) fn new(planned: Vec<usize>) -> Self {
        Self { planned: planned.into_iter(), again: VecDeque::new() }
    }

    /// The next delivery, and when it is due. Nothing is left when there is none: what is out at the moment comes back
    /// to whoever has it, and he asks once more.
    pub(crate) fn next(&mut self) -> Option<(Instant, usize)> {
        let now = Instant::now();
        match self.again.front() {
            Some((due, _)) if *due <= now => self.again.pop_front(),
            _ => self.planned.next().map(|event| (now, event)).or_else(|| self.again.pop_front()),
        }
    }

    pub(crate) fn again(&mut self, event: usize, after: Duration) {
        self.again.push_back((Instant::now() + after, event));
    }
}
