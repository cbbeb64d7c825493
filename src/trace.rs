//! The trace of a call, as a `traceparent` names it (W3C Trace Context).

use std::fmt;

/// The length of a `traceparent` of version 00, and of the known part of a later version.
const LENGTH: usize = 55;

/// The trace of the call, if it has one. An array, so that the options of a call stay `Copy`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trace(Option<[u8; LENGTH]>);

impl Trace {
    pub(crate) const NONE: Self = Self(None);

    /// No trace if the text is not valid by the standard.
    pub(crate) fn of(traceparent: &str) -> Self {
        Self(known_part(traceparent).and_then(|known| known.as_bytes().try_into().ok()))
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(self.0.as_ref()?).ok()
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

/// The version, the ids of the trace and of the parent, and the flags. A version after 00 may append more.
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

#[cfg(test)]
#[path = "../tests/unit/trace.rs"]
mod tests;
