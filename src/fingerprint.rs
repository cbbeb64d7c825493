//! The fingerprint: what makes two requests under one key the same request.

mod canonical;
mod member;
mod number;
mod object;
#[cfg(feature = "http")]
pub(crate) mod pointer;
#[cfg(feature = "http")]
pub(crate) mod request;

use std::fmt;

use serde::Serialize;
use sha2::{Digest, Sha256};

use canonical::CanonicalJson;
pub use canonical::InvalidBody;

/// Version 1: SHA-256 of one byte for the kind (`j` canonical JSON, `b` raw bytes, `h` an HTTP request) and the content.
const VERSION: u8 = 1;
/// Version 2, over HTTP, where the service has chosen what makes two requests the same: eight bytes that stand for the choice,
/// and 24 of the SHA-256 of `c`, the choice and what it takes of the request. Fingerprints of two choices are not compared:
/// equal or not, they would say nothing about the requests.
const CHOSEN: u8 = 2;
const CHOICE: std::ops::Range<usize> = 1..9;

/// What makes two requests the same: a version byte and a SHA-256, of which a choice of the service's own over HTTP takes a
/// part.
///
/// The version that a record was *stored* with decides how later requests are compared with it, so that a new release
/// which hashes in another way does not take every key in flight for reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 33]);

impl Fingerprint {
    /// The fingerprint of raw bytes, as they came over the wire.
    ///
    /// Take this for bodies that are not JSON, and where every byte counts: white space, the order and repetition of
    /// members, numbers with more digits than an `f64` holds.
    ///
    /// A record stored with a fingerprint of bytes and asked for with a body of the same content, or the other way round,
    /// is *key reused*: the two are different kinds.
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
    /// What the value's [`Serialize`] leaves out, a `#[serde(skip_serializing)]` field, does not count. What it writes in no
    /// fixed order, a `HashSet`, has another fingerprint each time: take a `BTreeSet` or a sorted `Vec`. (Maps are sorted.)
    ///
    /// A number that was *parsed* into an `f64` (as [`serde_json::Value`] does beyond 64-bit integers) has lost its
    /// further digits before it comes here: where those count, use [`Fingerprint::of_bytes`].
    ///
    /// # Errors
    ///
    /// [`InvalidBody`] where the value has no canonical form: NaN, an infinity, two members of one name, a map key that is
    /// no string, or an error of the value's own [`Serialize`].
    pub fn of_json<T: Serialize + ?Sized>(value: &T) -> Result<Self, InvalidBody> {
        let mut json = CanonicalJson::new(Sha256::new_with_prefix(b"j"));
        value.serialize(&mut json)?;
        Ok(Self::new(json.finish()?))
    }

    /// The fingerprint of an HTTP request: `parts` (method, path with query, content type), each behind its length, and then
    /// the body as one of the kinds above.
    #[cfg(feature = "http")]
    pub(crate) fn of_request(parts: [&[u8]; 3], content: request::Content<'_>) -> Result<Self, InvalidBody> {
        let mut hasher = Sha256::new_with_prefix(b"h");
        for part in parts {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        Ok(Self::new(content.hash_into(hasher)?))
    }

    /// The fingerprint of a request under a choice of the service's own: the `request` as it is compared, and `further` parts
    /// of it.
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

    fn new(hasher: Sha256) -> Self {
        let mut bytes = [VERSION; 33];
        bytes[1..].copy_from_slice(&hasher.finalize());
        Self(bytes)
    }

    /// The version byte and the SHA-256, as the column `fingerprint` holds them.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Compares with a stored one, in the stored one's version.
    pub(crate) fn compare(&self, stored: &[u8]) -> Comparison {
        match stored.first() {
            _ if stored == self.0 => Comparison::Same,
            Some(&CHOSEN) if stored.get(CHOICE) != self.0.get(CHOICE) => Comparison::UnknownVersion(CHOSEN),
            Some(&version) if version == self.0[0] => Comparison::Other,
            Some(&version) => Comparison::UnknownVersion(version),
            // Barred by the schema's `fingerprint_is_versioned`.
            None => Comparison::UnknownVersion(0),
        }
    }
}

/// The version and the first bytes: enough to tell two apart in a log.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint(v{}:", self.0[0])?;
        let digest = if self.0[0] == CHOSEN { CHOICE.end } else { 1 };
        self.0[digest..digest + 4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…)")
    }
}

/// What a stored fingerprint says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Same,
    Other,
    UnknownVersion(u8),
}

/// What can be fingerprinted: anything [`Serialize`], as canonical JSON, or a ready [`Fingerprint`].
///
/// There is nothing to implement: the two implementations here are the whole choice.
pub trait Body: sealed::Sealed {
    /// The fingerprint of this body.
    ///
    /// # Errors
    ///
    /// [`InvalidBody`], as [`Fingerprint::of_json`] says; a ready fingerprint gives none.
    fn fingerprint(&self) -> Result<Fingerprint, InvalidBody>;
}

impl<T: Serialize + ?Sized> Body for T {
    fn fingerprint(&self) -> Result<Fingerprint, InvalidBody> {
        Fingerprint::of_json(self)
    }
}

impl Body for Fingerprint {
    fn fingerprint(&self) -> Result<Fingerprint, InvalidBody> {
        Ok(*self)
    }
}

mod sealed {
    pub trait Sealed {}
    impl<T: serde::Serialize + ?Sized> Sealed for T {}
    impl Sealed for super::Fingerprint {}
}
