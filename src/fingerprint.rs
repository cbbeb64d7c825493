//! The fingerprint of a request: its digest, and the comparison with a stored fingerprint. `canonical` turns a JSON
//! text into canonical JSON.

mod canonical;

use std::fmt::{self, Display};

use serde::Serialize;
use sha2::{Digest, Sha256};

use canonical::canonical;

/// Version 1 is a SHA-256 of one byte for the kind, and of the content. The kinds are `j` for canonical JSON, `t` for a
/// JSON text without a canonical form, and `h` for an HTTP request whose body is of the kind `j` or `t`.
const JSON: u8 = 1;
/// Version 2 is for HTTP, if the service has chosen which parts make two requests the same. The fingerprint consists of
/// eight bytes for the choice, and of the first 24 bytes of a SHA-256. The SHA-256 begins with the byte `c`, which
/// names the kind. The SHA-256 then covers the choice and the chosen parts of the request. The crate does not compare
/// fingerprints of two different choices, because their comparison would not show whether the requests are the same.
const CHOSEN: u8 = 2;
const CHOICE: std::ops::Range<usize> = 1..9;
/// Version 3 is a SHA-256 of the unchanged bytes, so that every language computes the same fingerprint. The SQL
/// function `idempotency.fingerprint` computes this version.
const BYTES: u8 = 3;

/// A digest of everything that makes two requests the same. The digest consists of a version byte and a SHA-256. (If a
/// service behind the HTTP layer chooses which parts count, a digest of the choice replaces eight bytes of the
/// SHA-256.)
///
/// A later request is compared in the version of the *stored* fingerprint. So after an upgrade to a release that hashes
/// in another way, a retry still matches the stored fingerprint of its key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 33]);

impl Fingerprint {
    /// Returns the fingerprint of raw bytes, as they came over the wire. The fingerprint consists of the byte 3 and a
    /// SHA-256 of the bytes.
    ///
    /// Use this function for bodies that are not JSON. Use this function also if white space matters, or the order or
    /// the repetition of members, or the digits of a number that an `f64` cannot hold. Callers in other languages get
    /// the same fingerprint from the SQL function `idempotency.fingerprint`. If such callers share keys with your
    /// service, use `of_bytes` for these keys.
    ///
    /// A fingerprint of bytes and a fingerprint of JSON cannot be compared, even for the same content. A retry with the
    /// other kind of fingerprint gets [`Incompatible::UnknownFingerprint`](crate::Incompatible::UnknownFingerprint).
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

    /// Returns the fingerprint of a value as canonical JSON. The canonical form is made from the value's JSON text.
    ///
    /// The canonical form has no white space. Members are sorted by their names. Strings are escaped only where JSON
    /// requires an escape. Numbers are compared by value, with every digit.
    ///
    /// - JSON texts with the same fingerprint: `{"a":1,"b":2}` and `{"b":2,"a":1}`; `1.0`, `1` and `1e0`.
    /// - JSON texts with different fingerprints: `9007199254740993` and `9007199254740992`; `1` and `"1"`; `[1,2]` and
    ///   `[2,1]`.
    ///
    /// These values need care:
    ///
    /// - A field that [`Serialize`] leaves out, by `#[serde(skip_serializing)]`, does not count.
    /// - A `HashSet` has no fixed order, so its fingerprint changes each time. Use a `BTreeSet` or a sorted `Vec`. (The
    ///   members of maps are sorted.)
    /// - NaN, infinity and `None` have the same fingerprint, because serde_json writes `null` for each of them.
    /// - A number that was *parsed* into an `f64` has already lost the digits that an `f64` cannot hold. By default, a
    ///   [`serde_json::Value`] holds every number other than a 64-bit integer as an `f64`. If the lost digits matter,
    ///   use [`Fingerprint::of_bytes`], or a
    ///   [`RawValue`](https://docs.rs/serde_json/latest/serde_json/value/struct.RawValue.html), which is JSON text.
    ///
    /// A text without a canonical form is compared byte by byte. Such a text has an object with two members of the same
    /// name, half of a surrogate pair (`"\ud800"`) in a string of a `RawValue`, or more than 128 levels.
    ///
    /// # Errors
    ///
    /// [`InvalidBody`] if serde_json cannot write the value. Either a map key is something other than a string, a
    /// number, a boolean or a unit variant, or the value's own [`Serialize`] returns an error.
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

    /// Returns the fingerprint of the bytes of an HTTP request. Programs in every language can build these bytes.
    #[cfg(feature = "http")]
    pub(crate) fn of_request(method: &str, target: &str, body: &[u8]) -> Self {
        Self::of_version(BYTES, Sha256::new_with_prefix([method, " ", target, "\n"].concat()).chain_update(body))
    }

    #[cfg(feature = "http")]
    pub(crate) fn of_json_request(method: &str, target: &str, body: &Self) -> Self {
        Self::of_version(JSON, hash_parts(b"h", &[method.as_bytes(), target.as_bytes(), body.as_bytes()]))
    }

    /// Returns the fingerprint of a request under the service's choice. `request` is the fingerprint of the method, the
    /// path with its query, and the parts of the body that count. `further` contains the lines of the chosen headers.
    #[cfg(feature = "http")]
    pub(crate) fn of_choice(choice: &[u8], request: &Self, further: &[u8]) -> Self {
        let hasher = hash_parts(b"c", &[choice, request.as_bytes(), further]);
        let mut bytes = [CHOSEN; 33];
        bytes[CHOICE].copy_from_slice(&Sha256::digest(choice)[..CHOICE.len()]);
        bytes[CHOICE.end..].copy_from_slice(&hasher.finalize()[..33 - CHOICE.end]);
        Self(bytes)
    }

    /// Returns the fingerprint that a record stores. `None` if the bytes do not have the length of a fingerprint.
    pub(crate) fn stored(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    fn of_version(version: u8, hasher: Sha256) -> Self {
        let mut bytes = [version; 33];
        bytes[1..].copy_from_slice(&hasher.finalize());
        Self(bytes)
    }

    /// The bytes of the fingerprint, as the column `fingerprint` stores them. The first byte is the version.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Compares this fingerprint with a stored fingerprint. Fingerprints of two versions or of two choices cannot be
    /// compared.
    pub(crate) fn compare(&self, stored: &[u8]) -> Comparison {
        match stored.first() {
            _ if stored == self.0 => Comparison::Same,
            Some(&CHOSEN) if stored.get(CHOICE) != self.0.get(CHOICE) => Comparison::UnknownVersion(CHOSEN),
            Some(&version) if version == self.0[0] => Comparison::Other,
            Some(&version) => Comparison::UnknownVersion(version),
            // No call stores an empty fingerprint.
            None => Comparison::UnknownVersion(0),
        }
    }
}

/// Hashes the length of each part before the part, so that two different requests never give the hash the same bytes.
#[cfg(feature = "http")]
fn hash_parts(kind: &[u8], parts: &[&[u8]]) -> Sha256 {
    parts.iter().fold(Sha256::new_with_prefix(kind), |hasher, part| {
        hasher.chain_update((part.len() as u64).to_be_bytes()).chain_update(part)
    })
}

/// Prints the version and the first four bytes of the digest, which are enough to tell two fingerprints apart in a log.
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

/// The reason why a body has no fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidBody {
    /// The body of the HTTP request is not JSON.
    #[error("the body is not JSON: {0}")]
    NotJson(String),
    /// serde_json cannot write the value. Either a map's key has a type that JSON does not support, or the value's own
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

/// A JSON pointer (RFC 6901) to a member of an object or to an element of an array. A pointer to the whole text is not
/// allowed.
#[cfg(feature = "http")]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pointer {
    tokens: Vec<String>,
}

#[cfg(feature = "http")]
impl Pointer {
    /// Returns `None` if the text is not a pointer, or points to the whole text.
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
        /// Returns the body as JSON, or `None` for a fingerprint.
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
