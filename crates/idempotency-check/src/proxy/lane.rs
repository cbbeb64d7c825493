//! The state of one connection of the service to the database. A lane records which messages belong together, and which
//! messages the server has answered.

use std::collections::{HashMap, VecDeque};

use crate::wire::Message;

use super::text::shape;

/// A group of a client's messages, which the proxy sends, loses or holds as a whole.
///
/// A simple query is a step of its own. In the extended protocol, all messages up to a Sync or a Flush are one step.
/// PostgreSQL executes the messages of a step one by one, but a client cannot act on an answer before the client has
/// sent the whole step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) sql: String,
    pub(super) shape: String,
    answer: Answer,
}

/// The messages of the server that end the answer to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// ReadyForQuery, after a simple query or after the start of a session.
    Query,
    /// ReadyForQuery, after a Sync.
    Sync,
    /// This number of replies, or an error, after a step that ends in a Flush.
    Replies(usize),
}

/// The role of a client's message in a step.
pub(super) enum Part {
    /// The message belongs to no step: it is a password, data of a COPY, or the end of the connection.
    Apart,
    /// The step is not complete yet.
    Begun,
    Complete(Step),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Unit {
    #[default]
    Unknown,
    Foreground,
    Background,
}

#[derive(Debug, Default)]
pub(super) struct Lane {
    prepared: HashMap<String, String>,
    gathered: Gathered,
    unanswered: VecDeque<Answer>,
    /// The state in the last ReadyForQuery: `I`, `T` or `E`. The value is 0 before the first ReadyForQuery.
    transaction: u8,
    /// `Some` while the server receives the data of a COPY. The value is `true` if a Sync will follow the data.
    copy: Option<bool>,
    /// Whether the current transaction, or the current statement outside a transaction, belongs to a request or to the
    /// background.
    pub(super) unit: Unit,
    /// Whether the answer to the last step is lost. The connection is closed at the end of this answer.
    pub(super) is_cut: bool,
}

#[derive(Debug, Default)]
struct Gathered {
    executed: Vec<String>,
    prepared: Vec<String>,
    replies: usize,
}

impl Lane {
    pub(super) fn up(&mut self, message: &Message) -> Part {
        let statement = message.statement().unwrap_or_default().into_owned();
        match message.kind() {
            0 if !message.is_cancel_request() => self.unanswered.push_back(Answer::Query),
            b'P' => {
                let sql = message.sql().unwrap_or_default().into_owned();
                self.gathered.prepared.push(sql.clone());
                self.prepared.insert(statement, sql);
                return self.begun();
            }
            b'B' => {
                self.gathered.executed.extend(self.prepared.get(&statement).cloned());
                return self.begun();
            }
            b'C' | b'D' | b'E' => return self.begun(),
            b'Q' => {
                self.gathered.executed.extend(message.sql().map(std::borrow::Cow::into_owned));
                return self.complete(Answer::Query);
            }
            b'S' | b'F' => return self.complete(Answer::Sync),
            b'H' => {
                let replies = self.gathered.replies;
                return self.complete(Answer::Replies(replies));
            }
            b'c' | b'f' => {
                self.gathered.executed.push("end of the data of COPY".to_owned());
                return match self.copy.take() {
                    Some(true) => Part::Begun,
                    _ => self.complete(Answer::Query),
                };
            }
            _ => {}
        }
        Part::Apart
    }

    fn begun(&mut self) -> Part {
        self.gathered.replies += 1;
        Part::Begun
    }

    fn complete(&mut self, answer: Answer) -> Part {
        let gathered = std::mem::take(&mut self.gathered);
        let sql = match (gathered.executed.is_empty(), gathered.prepared.is_empty()) {
            (false, _) => gathered.executed.join("; "),
            (true, false) => format!("prepare: {}", gathered.prepared.join("; ")),
            (true, true) => String::new(),
        };
        Part::Complete(Step { shape: shape(&sql), sql, answer })
    }

    /// Records that the step is on its way to the server.
    pub(super) fn sent(&mut self, step: &Step) {
        self.unanswered.push_back(step.answer);
    }

    /// Whether the next message of the server belongs to the lost answer.
    pub(super) fn is_lost(&self) -> bool {
        self.is_cut && self.unanswered.len() == 1
    }

    pub(super) fn down(&mut self, message: &Message) {
        let front = self.unanswered.front_mut();
        match (message.kind(), front) {
            (b'Z', _) => {
                self.transaction = message.ready().unwrap_or_default();
                if self.transaction == b'I' {
                    self.unit = Unit::Unknown;
                }
                while self.unanswered.pop_front().is_some_and(|answer| matches!(answer, Answer::Replies(_))) {}
            }
            (b'G', front) => {
                // A client that used the extended protocol has sent a Sync, which the server ignores within a COPY.
                self.copy = Some(!matches!(front, Some(Answer::Query)));
                self.unanswered.pop_front();
            }
            // After an error, the server skips all messages up to the next Sync.
            (b'E', Some(Answer::Replies(_))) => {
                while matches!(self.unanswered.front(), Some(Answer::Replies(_))) {
                    self.unanswered.pop_front();
                }
            }
            (b'1' | b'2' | b'3' | b'T' | b'n' | b'C' | b'I' | b's', Some(Answer::Replies(left))) => {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    self.unanswered.pop_front();
                }
            }
            _ => {}
        }
    }

    pub(super) fn is_answered(&self) -> bool {
        self.unanswered.is_empty()
    }

    /// Whether every step is answered, and no transaction is open.
    pub(super) fn is_idle(&self) -> bool {
        self.is_answered() && matches!(self.transaction, b'I' | 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(part: Part) -> Step {
        let Part::Complete(step) = part else { panic!("not complete") };
        step
    }

    fn front(kind: u8, body: &[u8]) -> Message {
        Message::new(kind, body)
    }

    #[test]
    fn the_messages_up_to_a_sync_are_one_step_and_named_by_what_they_execute() {
        let mut lane = Lane::default();
        assert!(matches!(lane.up(&front(b'P', b"s1\0select 1\0\0\0")), Part::Begun));
        let prepared = complete(lane.up(&front(b'S', b"")));
        assert_eq!(prepared.sql, "prepare: select 1");
        lane.sent(&prepared);
        lane.down(&front(b'1', b""));
        assert!(!lane.is_answered(), "only ReadyForQuery answers a Sync");
        lane.down(&front(b'Z', b"I"));
        assert!(lane.is_idle());
        lane.up(&front(b'B', b"\0s1\0\0\0"));
        lane.up(&front(b'E', b"\0\0\0\0\0"));
        assert_eq!(complete(lane.up(&front(b'S', b""))).sql, "select 1");
    }

    #[test]
    fn a_flush_is_answered_by_a_reply_for_each_message_or_an_error() {
        let replies: [&[u8]; 2] = [b"1nC", b"E"];
        for replies in replies {
            let mut lane = Lane::default();
            for message in [front(b'P', b"\0select 1\0\0\0"), front(b'D', b"S\0"), front(b'E', b"\0\0\0\0\0")] {
                lane.up(&message);
            }
            let step = complete(lane.up(&front(b'H', b"")));
            lane.sent(&step);
            for &kind in replies {
                assert!(!lane.is_answered());
                lane.down(&front(kind, b""));
            }
            assert!(lane.is_answered());
        }
    }

    #[test]
    fn pipelined_steps_are_answered_in_their_order_and_only_the_last_is_lost() {
        let mut lane = Lane::default();
        for _ in 0..2 {
            let step = complete(lane.up(&front(b'Q', b"select 1\0")));
            lane.sent(&step);
        }
        lane.is_cut = true;
        assert!(!lane.is_lost());
        lane.down(&front(b'Z', b"T"));
        assert!(lane.is_lost() && !lane.is_answered() && !lane.is_idle());
        lane.down(&front(b'Z', b"I"));
        assert!(lane.is_answered());
    }

    #[test]
    fn the_end_of_a_simple_copy_is_a_step() {
        let mut lane = Lane::default();
        let step = complete(lane.up(&front(b'Q', b"copy t from stdin\0")));
        lane.sent(&step);
        lane.down(&front(b'G', b""));
        assert!(lane.is_answered(), "the server waits for the data");
        assert!(matches!(lane.up(&front(b'd', b"1\n")), Part::Apart));
        assert_eq!(complete(lane.up(&front(b'c', b""))).sql, "end of the data of COPY");
    }
}
