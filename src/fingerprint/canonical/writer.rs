//! The text of the canonical JSON, on its way to the hasher.

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::members::OpenObjects;
use super::number::{write_decimal, write_integer};
use crate::fingerprint::invalid_body::InvalidBody;

/// How much text gathers before it goes to the hasher: enough for SHA-256 to work on whole blocks, and small enough for
/// the cache.
const FLUSH_BYTES: usize = 8 * 1024;

/// Most bodies fit in this, so that the buffer need not grow in steps.
const SMALL_BYTES: usize = 512;

/// Whether serde_json was built with `arbitrary_precision`. Only then does it read a number that no `f64` holds.
#[cfg(feature = "http")]
static PARSER_GIVES_MAPS: std::sync::LazyLock<bool> =
    std::sync::LazyLock::new(|| serde_json::from_str::<serde_json::Number>("1e400").is_ok());

/// The serializer. Give it to [`Serialize::serialize`] by `&mut`, then [`finish`](Self::finish).
pub(in crate::fingerprint) struct CanonicalJson {
    hasher: Sha256,
    pub(super) out: Vec<u8>,
    pub(super) objects: OpenObjects,
    /// Whether a map whose one member has serde_json's private name for numbers is a number. True only for the output
    /// of serde_json's own parser.
    pub(super) numbers_as_maps: bool,
    /// The error of a part, kept in case the value's own `Serialize` ignores it.
    pub(super) failed: Option<InvalidBody>,
}

impl CanonicalJson {
    pub(in crate::fingerprint) fn new(hasher: Sha256) -> Self {
        Self {
            hasher,
            out: Vec::with_capacity(SMALL_BYTES),
            objects: OpenObjects::default(),
            numbers_as_maps: false,
            failed: None,
        }
    }

    /// For the output of serde_json's parser. If another crate has turned `arbitrary_precision` on, the parser gives
    /// each number as a map of one member, its text.
    #[cfg(feature = "http")]
    pub(in crate::fingerprint) fn of_parser(hasher: Sha256) -> Self {
        Self { numbers_as_maps: *PARSER_GIVES_MAPS, ..Self::new(hasher) }
    }

    pub(in crate::fingerprint) fn finish(mut self) -> Result<Sha256, InvalidBody> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.hasher.update(&self.out);
        Ok(self.hasher)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
        self.flush_if_large();
    }

    /// Writes a value that is a part of another one.
    pub(super) fn write_part<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), InvalidBody> {
        value.serialize(&mut *self).inspect_err(|error| self.failed = Some(error.clone()))
    }

    /// Writes a number by value, from its text.
    pub(super) fn write_number(&mut self, text: &str) {
        write_decimal(&mut self.out, text);
        self.flush_if_large();
    }

    pub(super) fn write_integer(&mut self, value: impl itoa::Integer) {
        write_integer(&mut self.out, value);
        self.flush_if_large();
    }

    pub(super) fn write_string(&mut self, text: &str) {
        self.out.push(b'"');
        // A loop over all bytes without an early exit takes a fraction of the time, because the compiler vectorizes it.
        if text.bytes().fold(false, |any, byte| any | is_escaped(byte)) {
            self.write_escaped(text.as_bytes());
        } else {
            self.out.extend_from_slice(text.as_bytes());
        }
        self.write(b"\"");
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

    /// Writes `{"Variant":` of an externally tagged enum. The caller writes the value and the closing brace.
    pub(super) fn open_variant(&mut self, variant: &str) {
        self.write(b"{");
        self.write_string(variant);
        self.write(b":");
    }

    pub(super) fn flush_if_large(&mut self) {
        if self.objects.is_empty() && self.out.len() >= FLUSH_BYTES {
            self.hasher.update(&self.out);
            self.out.clear();
        }
    }
}

/// Whether JSON requires an escape for this byte.
fn is_escaped(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\'
}
