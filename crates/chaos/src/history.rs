//! The history of calls as the callers saw it: when each began, and what it returned. Nothing here reads the database.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// Nanoseconds of the machine's clock, which all processes of the suite share.
pub(crate) type Moment = u64;

pub(crate) fn now() -> Moment {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// One line of a history.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) at: Moment,
    /// The name of the call, which is unique. The effect of a call has its name.
    pub(crate) call: String,
    pub(crate) key: String,
    pub(crate) what: What,
}

impl Event {
    /// JSON, in one line.
    fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum What {
    Invoked,
    /// Lease mode: the call has won the claim, which has this token.
    Claimed(i64),
    /// The call performed, and returned this response.
    Performed(String),
    /// The call returned the response of an earlier one.
    Replayed(String),
    /// An error after which nothing was performed, or everything was undone.
    Refused(String),
    /// Anything can have happened: a lost connection, a dropped future.
    Unknown(String),
    /// The error *indeterminate*, which stays until an operator has settled the record. It is wrong where no caller has
    /// left such a record.
    Barred(String),
    /// An answer that must not be given here.
    Wrong(String),
}

impl What {
    /// Whether a caller that gets it does not ask again.
    pub(crate) fn is_answer(&self) -> bool {
        match self {
            Self::Performed(_) | Self::Replayed(_) | Self::Barred(_) | Self::Wrong(_) => true,
            Self::Invoked | Self::Claimed(_) | Self::Refused(_) | Self::Unknown(_) => false,
        }
    }
}

/// A call from its invocation to its end. Without an end, its result is unknown.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) key: String,
    pub(crate) invoked: Moment,
    pub(crate) ended: Moment,
    /// Lease mode: the token of its last claim.
    pub(crate) token: Option<i64>,
    pub(crate) end: What,
}

impl Call {
    /// Whether a resumer made the call, and completed an operation.
    pub(crate) fn was_resumed(&self) -> bool {
        self.name.contains("resumer") && matches!(self.end, What::Performed(_))
    }

    /// The response that the caller has got.
    pub(crate) fn response(&self) -> Option<&str> {
        match &self.end {
            What::Performed(response) | What::Replayed(response) => Some(response),
            _ => None,
        }
    }
}

/// The events of a world. A worker process prints them, and keeps none.
#[derive(Debug, Default)]
pub(crate) struct History {
    events: Mutex<Vec<Event>>,
    prints: bool,
}

impl History {
    pub(crate) fn printed() -> Self {
        Self { prints: true, ..Self::default() }
    }

    pub(crate) fn add(&self, call: &str, key: &str, what: What) {
        self.push(Event { at: now(), call: call.to_owned(), key: key.to_owned(), what });
    }

    pub(crate) fn push(&self, event: Event) {
        if self.prints {
            // One write for each line, so that SIGKILL leaves no half of one.
            println!("{}", event.line());
        } else {
            self.events().push(event);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.events().len()
    }

    /// The events of this key, one line each.
    pub(crate) fn of(&self, key: &str) -> Vec<String> {
        self.events().iter().filter(|event| event.key == key).map(Event::line).collect()
    }

    /// Every call, in the order of invocation.
    pub(crate) fn calls(&self) -> Vec<Call> {
        calls(&self.events())
    }

    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn calls(events: &[Event]) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for event in events {
        if event.what == What::Invoked {
            places.insert(&event.call, calls.len());
            calls.push(Call {
                name: event.call.clone(),
                key: event.key.clone(),
                invoked: event.at,
                ended: Moment::MAX,
                token: None,
                end: What::Unknown("killed".to_owned()),
            });
        }
    }
    for event in events {
        let Some(call) = places.get(event.call.as_str()).map(|place| &mut calls[*place]) else { continue };
        match &event.what {
            What::Invoked => {}
            What::Claimed(token) => call.token = Some(*token),
            end => {
                call.ended = event.at;
                call.end = end.clone();
            }
        }
    }
    calls.sort_by_key(|call| call.invoked);
    calls
}

/// The longest time in which no caller got a response.
pub(crate) fn longest_outage(calls: &[Call]) -> Duration {
    let mut moments: Vec<Moment> =
        calls.iter().filter(|call| call.response().is_some()).map(|call| call.ended).collect();
    moments.extend(calls.first().map(|first| first.invoked));
    moments.sort_unstable();
    let longest = moments.windows(2).map(|two| two[1] - two[0]).max().unwrap_or_default();
    Duration::from_nanos(longest)
}
