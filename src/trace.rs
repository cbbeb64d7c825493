//! The trace of a call, as a `traceparent` names it (W3C Trace Context).

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

/// The length of a `traceparent` of version 00, and of the known part of a later version.
const LENGTH: usize = 55;

/// The trace of the call, if it has one. All traces compare as equal, so that the trace does not distinguish keys.
#[derive(Clone, Default)]
pub(crate) struct Trace(Option<Box<str>>);

impl Trace {
    /// None, if the text is not valid by the standard.
    pub(crate) fn of(traceparent: &str) -> Self {
        Self(known_part(traceparent).map(Box::from))
    }

    pub(crate) fn as_deref(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

/// The version, the ids of the trace and of the parent, and the flags. A later version than 00 may add to them.
fn known_part(traceparent: &str) -> Option<&str> {
    let (known, rest) = traceparent.split_at_checked(LENGTH)?;
    let parts: Vec<&str> = known.split('-').collect();
    let [version, trace_id, parent_id, flags] = parts[..] else { return None };
    let is_hex =
        |text: &str, length| text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_id = |text: &str, length| is_hex(text, length) && text.bytes().any(|digit| digit != b'0');
    let valid = is_hex(version, 2)
        && version != "ff"
        && is_id(trace_id, 32)
        && is_id(parent_id, 16)
        && is_hex(flags, 2)
        && (rest.is_empty() || version != "00" && rest.starts_with('-'));
    valid.then_some(known)
}

/// The id of the trace in a stored `traceparent`.
pub(crate) fn trace_id(stored: &str) -> Option<&str> {
    stored.get(3..35)
}

impl PartialEq for Trace {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Trace {}

impl PartialOrd for Trace {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Trace {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}

impl Hash for Trace {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

#[cfg(test)]
#[path = "../tests/unit/trace.rs"]
mod tests;
