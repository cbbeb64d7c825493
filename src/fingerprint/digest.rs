//! The digest of a request, and its comparison with a stored one.

use std::fmt;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::canonical::CanonicalJson;
use super::invalid_body::InvalidBody;
#[cfg(feature = "http")]
use super::request::Content;

/// Version 1: SHA-256 of one byte for the kind (`j` canonical JSON, `b` raw bytes, `h` an HTTP request) and the
/// content.
const VERSION: u8 = 1;
/// Version 2, over HTTP, if the service has chosen what makes two requests the same: eight bytes that stand for the
/// choice, and 24 bytes of the SHA-256 of `c`, the choice, and the chosen parts of the request. Fingerprints of two
/// different choices are not compared, because they say nothing about whether the requests are the same.
const CHOSEN: u8 = 2;
const CHOICE: std::ops::Range<usize> = 1..9;

/// A digest of what makes two requests the same: a version byte and a SHA-256. (Over HTTP, a service may choose what
/// counts; then eight bytes of the SHA-256 give way to the choice.)
///
/// The version with which a record was *stored* decides how later requests are compared with it. So a new release that
/// hashes in another way does not take every key in flight for reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 33]);

impl Fingerprint {
    /// The fingerprint of raw bytes, as they came over the wire.
    ///
    /// Use this for bodies that are not JSON, and if every byte counts: white space, the order and repetition of
    /// members, numbers with more digits than an `f64` holds.
    ///
    /// A fingerprint of bytes and a fingerprint of canonical JSON are never the same, even for the same content: such a
    /// repeat is *key reused*.
    ///
    /// ```
    /// # use pg_idempotency::Fingerprint;
    /// assert_ne!(Fingerprint::of_bytes(b"1"), Fingerprint::of_bytes(b"1.0"));
    /// ```
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut hasher = Sha256::new_with_prefix(b"b");
        hasher.update(bytes);
        Self::new(hasher)
    }

    /// The fingerprint of a value as canonical JSON.
    ///
    /// The canonical form has no white space; members are sorted by the code points of their names; strings are escaped
    /// only where JSON demands it; numbers are compared by value, with every digit they have. So `{"a":1,"b":2}` and
    /// `{"b":2,"a":1}` are one request, and so are `1.0` and `1` and `1e0`; `9007199254740993` and `9007199254740992`
    /// are two, and so are `1` and `"1"`, and `[1,2]` and `[2,1]`.
    ///
    /// A field that the value's [`Serialize`] leaves out, by `#[serde(skip_serializing)]`, does not count. A `HashSet`
    /// writes its elements in no fixed order, so it has a new fingerprint each time: use a `BTreeSet` or a sorted
    /// `Vec`. (Maps are sorted.)
    ///
    /// A number that was *parsed* into an `f64` (as [`serde_json::Value`] does beyond 64-bit integers) has lost its
    /// further digits before it comes here. If those count, use [`Fingerprint::of_bytes`].
    ///
    /// # Errors
    ///
    /// [`InvalidBody`] if the value has no canonical form: NaN, an infinity, two members of one name, a map key that is
    /// no string, or an error of the value's own [`Serialize`].
    pub fn of_json<T: Serialize + ?Sized>(value: &T) -> Result<Self, InvalidBody> {
        let mut json = CanonicalJson::new();
        value.serialize(&mut json)?;
        Ok(Self::new(Sha256::new_with_prefix(b"j").chain_update(json.finish()?)))
    }

    /// The fingerprint of an HTTP request: `parts` (method, path with query, content type), each with its length in
    /// front, and then the body as one of the kinds above.
    #[cfg(feature = "http")]
    pub(crate) fn of_request(parts: [&[u8]; 3], content: Content<'_>) -> Result<Self, InvalidBody> {
        let mut hasher = Sha256::new_with_prefix(b"h");
        for part in parts {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        Ok(Self::new(content.hash_into(hasher)?))
    }

    /// The fingerprint of a request under the service's own choice: the `request` as the choice compares it, and
    /// `further` parts of it.
    #[cfg(feature = "http")]
    pub(crate) fn of_choice(choice: &[u8], request: &Self, further: &[u8]) -> Self {
        let mut hasher = Sha256::new_with_prefix(b"c");
        for part in [choice, request.as_bytes(), further] {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        let mut bytes = [CHOSEN; 33];
        bytes[CHOICE].copy_from_slice(&Sha256::digest(choice)[..CHOICE.len()]);
        bytes[CHOICE.end..].copy_from_slice(&hasher.finalize()[..33 - CHOICE.end]);
        Self(bytes)
    }

    /// A fingerprint as a record stores it. `None` if its length is none of the known versions'.
    pub(crate) fn stored(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    fn new(hasher: Sha256) -> Self {
        let mut bytes = [VERSION; 33];
        bytes[1..].copy_from_slice(&hasher.finalize());
        Self(bytes)
    }

    /// The version byte and the SHA-256, as the column `fingerprint` stores them.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Compares this fingerprint with a stored one, in the version of the stored one.
    pub(crate) fn compare(&self, stored: &[u8]) -> Comparison {
        match stored.first() {
            _ if stored == self.0 => Comparison::Same,
            Some(&CHOSEN) if stored.get(CHOICE) != self.0.get(CHOICE) => Comparison::UnknownVersion(CHOSEN),
            Some(&version) if version == self.0[0] => Comparison::Other,
            Some(&version) => Comparison::UnknownVersion(version),
            // The rule `fingerprint_is_versioned` of migrations/strict.sql excludes it.
            None => Comparison::UnknownVersion(0),
        }
    }
}

/// Prints the version and the first bytes, which are enough to tell two fingerprints apart in a log.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint(v{}:", self.0[0])?;
        let digest = if self.0[0] == CHOSEN { CHOICE.end } else { 1 };
        self.0[digest..digest + 4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…)")
    }
}

/// The result of comparing a request with a stored fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Same,
    Other,
    UnknownVersion(u8),
}
