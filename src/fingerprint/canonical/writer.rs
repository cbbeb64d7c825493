//! The buffer in which the canonical JSON is built.

use std::ops::Range;

use serde::Serialize;

use crate::fingerprint::invalid_body::InvalidBody;

/// Most bodies fit in this, so that the buffer need not grow in steps.
const SMALL_BYTES: usize = 512;

/// Whether serde_json was built with `arbitrary_precision`. Only then does it read a number that no `f64` holds.
#[cfg(feature = "http")]
static PARSER_GIVES_MAPS: std::sync::LazyLock<bool> =
    std::sync::LazyLock::new(|| serde_json::from_str::<serde_json::Number>("1e400").is_ok());

/// The serializer. Give it to [`Serialize::serialize`] by `&mut`, then [`finish`](Self::finish).
pub(in crate::fingerprint) struct CanonicalJson {
    pub(super) out: Vec<u8>,
    /// The members of all open objects, those of the innermost one last. They share these two buffers, so that no
    /// object allocates.
    pub(super) members: Vec<Member>,
    /// The unescaped names by which members are sorted, one after the other.
    pub(super) names: Vec<u8>,
    /// Whether the value that comes next is the name of a member.
    pub(super) in_name: bool,
    /// Whether a map whose one member has serde_json's private name for numbers is a number. True only for the output
    /// of serde_json's own parser.
    pub(super) numbers_as_maps: bool,
    /// The error of a part, kept in case the value's own `Serialize` ignores it.
    failed: Option<InvalidBody>,
}

pub(super) struct Member {
    pub(super) name: Range<usize>,
    /// The place of `"name":value` in the buffer.
    pub(super) text: Range<usize>,
}

impl CanonicalJson {
    pub(in crate::fingerprint) fn new() -> Self {
        Self {
            out: Vec::with_capacity(SMALL_BYTES),
            members: Vec::new(),
            names: Vec::new(),
            in_name: false,
            numbers_as_maps: false,
            failed: None,
        }
    }

    /// For the output of serde_json's parser. If another crate has turned `arbitrary_precision` on, the parser gives
    /// each number as a map of one member, its text.
    #[cfg(feature = "http")]
    pub(in crate::fingerprint) fn of_parser() -> Self {
        Self { numbers_as_maps: *PARSER_GIVES_MAPS, ..Self::new() }
    }

    pub(in crate::fingerprint) fn finish(self) -> Result<Vec<u8>, InvalidBody> {
        self.failed.map_or(Ok(self.out), Err)
    }

    /// Refuses a value that is no text, if it comes as the name of a member.
    pub(super) fn refuse_as_name(&self) -> Result<(), InvalidBody> {
        if self.in_name { Err(InvalidBody::KeyIsNoString) } else { Ok(()) }
    }

    /// Writes a part of a value: an element, or the name or the value of a member.
    pub(super) fn write_part<T: Serialize + ?Sized>(&mut self, part: &T) -> Result<(), InvalidBody> {
        part.serialize(&mut *self).inspect_err(|error| self.failed = Some(error.clone()))
    }

    /// Writes an integer or a boolean. As in serde_json, their text may be a name.
    pub(super) fn write_plain(&mut self, text: &str) {
        if self.in_name { self.write_name(text) } else { self.out.extend_from_slice(text.as_bytes()) }
    }

    /// Begins a member. Its value comes next.
    pub(super) fn write_name(&mut self, name: &str) {
        let (from, at) = (self.names.len(), self.out.len());
        self.names.extend_from_slice(name.as_bytes());
        self.members.push(Member { name: from..self.names.len(), text: at..at });
        self.write_string(name);
        self.out.push(b':');
    }

    pub(super) fn write_string(&mut self, text: &str) {
        self.out.push(b'"');
        // A loop over all bytes without an early exit takes a fraction of the time, because the compiler vectorizes it.
        if text.bytes().fold(false, |any, byte| any | is_escaped(byte)) {
            self.write_escaped(text.as_bytes());
        } else {
            self.out.extend_from_slice(text.as_bytes());
        }
        self.out.push(b'"');
    }

    fn write_escaped(&mut self, text: &[u8]) {
        for plain in text.split_inclusive(|byte| is_escaped(*byte)) {
            match plain.split_last() {
                Some((quoted @ (b'"' | b'\\'), plain)) => {
                    self.out.extend_from_slice(plain);
                    self.out.extend_from_slice(&[b'\\', *quoted]);
                }
                Some((control @ 0..0x20, plain)) => {
                    self.out.extend_from_slice(plain);
                    self.out.extend_from_slice(b"\\u00");
                    self.out.extend([control >> 4, control & 0xf].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
                }
                _ => self.out.extend_from_slice(plain),
            }
        }
    }
}

/// Whether JSON requires an escape for this byte.
fn is_escaped(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\'
}
