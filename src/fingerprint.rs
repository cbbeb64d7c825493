//! The fingerprint of a request: its digest, and the comparison with a stored one. `canonical` turns a JSON text into
//! canonical JSON.

mod canonical;

use std::fmt::{self, Display};

use serde::Serialize;
use sha2::{Digest, Sha256};

use canonical::canonical;

/// Version 1: SHA-256 of one byte for the kind (`j` canonical JSON, `t` a JSON text that has no canonical form, `h` an
/// HTTP request with one of them as its body) and the content.
const JSON: u8 = 1;
/// Version 2, over HTTP, if the service has chosen what makes two requests the same: eight bytes for the choice, and 24
/// bytes of the SHA-256 of `c`, the choice, and the chosen parts of the request. Fingerprints of two different choices
/// are not compared, because they say nothing about whether the requests are the same.
const CHOSEN: u8 = 2;
const CHOICE: std::ops::Range<usize> = 1..9;
/// Version 3: SHA-256 of the bytes as they are, so that every language computes it alike. `idempotency.fingerprint` of
/// the schema is the same function.
const BYTES: u8 = 3;

/// A digest of everything that makes two requests the same: a version byte and a SHA-256. (If a service behind the HTTP
/// layer chooses what counts, eight bytes of the SHA-256 stand for the choice.)
///
/// A later request is compared in the version of the *stored* fingerprint. So after a release that hashes in another
/// way, keys in flight are not refused as reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 33]);

impl Fingerprint {
    /// The fingerprint of raw bytes, as they came over the wire: the byte 3 and a SHA-256 of the bytes.
    ///
    /// Use this for bodies that are not JSON, and if every byte counts: white space, the order and repetition of
    /// members, numbers with more digits than an `f64` holds. Use it also for keys that this service shares with
    /// callers in other languages: `idempotency.fingerprint` of the schema returns the same.
    ///
    /// A fingerprint of bytes and one of JSON cannot be compared, even for the same content: the retry gets
    /// [`Incompatible::UnknownFingerprint`](crate::Incompatible::UnknownFingerprint).
    ///
    /// ```
    /// # use pg_idempotency::Fingerprint;
    /// let fingerprint = Fingerprint::of_bytes(b"POST /payments?dry=0\n{\"cents\":1250}");
    /// assert_eq!(fingerprint.as_bytes()[0], 3);
    /// ```
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self::of_version(BYTES, Sha256::new_with_prefix(bytes))
    }

    /// The fingerprint of a value as canonical JSON, which is made from the value's JSON text.
    ///
    /// The canonical form has no white space. Members are sorted by their names. Strings are escaped only where JSON
    /// demands it. Numbers are compared by value, with every digit.
    ///
    /// - One request: `{"a":1,"b":2}` and `{"b":2,"a":1}`; `1.0`, `1` and `1e0`.
    /// - Two requests: `9007199254740993` and `9007199254740992`; `1` and `"1"`; `[1,2]` and `[2,1]`.
    ///
    /// These values need care:
    ///
    /// - A field that [`Serialize`] leaves out, by `#[serde(skip_serializing)]`, does not count.
    /// - A `HashSet` has no fixed order, and so a new fingerprint each time. Use a `BTreeSet` or a sorted `Vec`. (Maps
    ///   are sorted.)
    /// - NaN, infinity and `None` are the same, because serde_json writes `null` for each.
    /// - A number that was *parsed* into an `f64` has already lost its further digits, as in a [`serde_json::Value`]
    ///   beyond 64-bit integers. If those digits matter, use [`Fingerprint::of_bytes`], or a
    ///   [`RawValue`](https://docs.rs/serde_json/latest/serde_json/value/struct.RawValue.html), which is JSON text.
    ///
    /// A text without a canonical form is compared byte by byte. Such a text has two members of the same name in an
    /// object, half of a surrogate pair (`"\ud800"`) in a string of a `RawValue`, or more than 128 levels.
    ///
    /// # Errors
    ///
    /// [`InvalidBody`] if serde_json cannot write the value: a map key that is neither a string, a number, a boolean
    /// nor a unit variant, or an error of the value's own [`Serialize`].
    pub fn of_json<T: Serialize + ?Sized>(value: &T) -> Result<Self, InvalidBody> {
        let text = serde_json::to_vec(value).map_err(InvalidBody::serialize)?;
        Ok(Self::of_text(&text, &[]))
    }

    #[cfg(feature = "http")]
    pub(crate) fn of_json_without<'p>(
        text: &[u8],
        pointers: impl IntoIterator<Item = &'p Pointer>,
    ) -> Result<Self, InvalidBody> {
        let text = str::from_utf8(text).map_err(InvalidBody::not_json)?;
        let serde::de::IgnoredAny = serde_json::from_str(text).map_err(InvalidBody::not_json)?;
        let paths: Vec<_> = pointers.into_iter().map(Pointer::tokens).collect();
        Ok(Self::of_text(text.as_bytes(), &paths))
    }

    fn of_text(text: &[u8], paths: &[&[String]]) -> Self {
        match canonical(text, paths) {
            Some(canonical) => Self::of_content(b"j", &canonical),
            None => Self::of_content(b"t", text),
        }
    }

    fn of_content(kind: &[u8], content: &[u8]) -> Self {
        Self::of_version(JSON, Sha256::new_with_prefix(kind).chain_update(content))
    }

    /// The fingerprint of an HTTP request byte by byte. Every language can put these bytes together.
    #[cfg(feature = "http")]
    pub(crate) fn of_request(method: &str, target: &str, body: &[u8]) -> Self {
        Self::of_version(BYTES, Sha256::new_with_prefix(format!("{method} {target}\n")).chain_update(body))
    }

    #[cfg(feature = "http")]
    pub(crate) fn of_json_request(method: &str, target: &str, body: &Self) -> Self {
        Self::of_version(JSON, hash_parts(b"h", &[method.as_bytes(), target.as_bytes(), body.as_bytes()]))
    }

    /// The fingerprint of a request under the service's choice: the `request` as the choice compares it, and `further`
    /// parts of it.
    #[cfg(feature = "http")]
    pub(crate) fn of_choice(choice: &[u8], request: &Self, further: &[u8]) -> Self {
        let hasher = hash_parts(b"c", &[choice, request.as_bytes(), further]);
        let mut bytes = [CHOSEN; 33];
        bytes[CHOICE].copy_from_slice(&Sha256::digest(choice)[..CHOICE.len()]);
        bytes[CHOICE.end..].copy_from_slice(&hasher.finalize()[..33 - CHOICE.end]);
        Self(bytes)
    }

    /// A fingerprint as a record stores it. `None` if no known version has its length.
    pub(crate) fn stored(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    fn of_version(version: u8, hasher: Sha256) -> Self {
        let mut bytes = [version; 33];
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

/// Hashes each part with its length in front, so that two different requests never give the same bytes.
#[cfg(feature = "http")]
fn hash_parts(kind: &[u8], parts: &[&[u8]]) -> Sha256 {
    parts.iter().fold(Sha256::new_with_prefix(kind), |hasher, part| {
        hasher.chain_update((part.len() as u64).to_be_bytes()).chain_update(part)
    })
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Same,
    Other,
    UnknownVersion(u8),
}

/// A body with a fingerprint: any [`Serialize`] value, as canonical JSON, or a ready [`Fingerprint`]. The trait is
/// sealed.
pub trait Body: sealed::Sealed {
    /// The fingerprint of this body.
    ///
    /// # Errors
    ///
    /// [`InvalidBody`], as for [`Fingerprint::of_json`]. A body that already is a [`Fingerprint`] never causes an
    /// error.
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

/// Why a body has no fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidBody {
    /// The body of the HTTP request is not JSON.
    #[error("the body is not JSON: {0}")]
    NotJson(String),
    /// serde_json cannot write the value: a map's key is no string, or the value's own
    /// [`Serialize`](serde::Serialize) failed.
    #[error("the body cannot be serialized: {0}")]
    Serialize(String),
}

impl InvalidBody {
    #[cfg(feature = "http")]
    fn not_json(error: impl Display) -> Self {
        Self::NotJson(error.to_string())
    }

    fn serialize(error: impl Display) -> Self {
        Self::Serialize(error.to_string())
    }
}

/// A JSON pointer (RFC 6901) to a member of an object, or to an element of an array; never to the whole text.
#[cfg(feature = "http")]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pointer {
    tokens: Vec<String>,
}

#[cfg(feature = "http")]
impl Pointer {
    /// `None` if the text is no pointer, or points to the whole text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let tokens = text.strip_prefix('/')?.split('/').map(unescaped);
        Some(Self { tokens: tokens.collect::<Option<_>>()? })
    }

    pub(crate) fn tokens(&self) -> &[String] {
        &self.tokens
    }
}

#[cfg(feature = "http")]
fn unescaped(token: &str) -> Option<String> {
    let valid = token.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    valid.then(|| token.replace("~1", "/").replace("~0", "~"))
}

mod sealed {
    use super::InvalidBody;

    pub trait Sealed {
        /// The body as JSON. `None` for a fingerprint.
        fn json(&self) -> Option<Result<Vec<u8>, InvalidBody>>;
    }

    impl<T: serde::Serialize + ?Sized> Sealed for T {
        fn json(&self) -> Option<Result<Vec<u8>, InvalidBody>> {
            Some(serde_json::to_vec(self).map_err(InvalidBody::serialize))
        }
    }

    impl Sealed for super::Fingerprint {
        fn json(&self) -> Option<Result<Vec<u8>, InvalidBody>> {
            None
        }
    }
}

#[cfg(all(test, feature = "http"))]
#[path = "../tests/unit/fingerprint.rs"]
mod tests;
