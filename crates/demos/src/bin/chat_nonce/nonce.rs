//! The nonce: how a client names a message before the message has an id.

use std::fmt;

use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize};

/// What Discord documents: room for its ids (20 digits) and for 100 random bits in hexadecimal. At four bytes a
/// character it stays far below what a part of a key may have.
const LONGEST: usize = 25;

/// A string of at most 25 characters, or an integer of 64 bits, which is the string of its digits: `1` and `"1"` are
/// **the same nonce**. Client libraries turn one into the other (an id that JavaScript cannot hold goes as a string),
/// and the retry may come from another library than the first request, as it may over another transport. Had we told
/// them apart, that retry would be a second message.
///
/// Anything else is refused, also where nothing is enforced: a float and an integer beyond 64 bits have lost digits
/// somewhere, perhaps those by which two nonces differ.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct Nonce(String);

impl Nonce {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Nonce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StringOrInteger)
    }
}

struct StringOrInteger;

impl Visitor<'_> for StringOrInteger {
    type Value = Nonce;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a nonce: a string of 1 to {LONGEST} characters, or an integer from {} to {}", i64::MIN, u64::MAX)
    }

    fn visit_str<E: Error>(self, nonce: &str) -> Result<Nonce, E> {
        match nonce.chars().count() {
            // A key takes none of these, and a nonce that is fine until it is enforced would be a trap.
            1..=LONGEST if nonce.contains(char::is_control) => Err(E::custom("a nonce has no control characters")),
            1..=LONGEST => Ok(Nonce(nonce.to_owned())),
            count => Err(E::invalid_length(count, &self)),
        }
    }

    fn visit_i64<E: Error>(self, nonce: i64) -> Result<Nonce, E> {
        Ok(Nonce(nonce.to_string()))
    }

    fn visit_u64<E: Error>(self, nonce: u64) -> Result<Nonce, E> {
        Ok(Nonce(nonce.to_string()))
    }

    // serde_json makes a float of an integer beyond 64 bits, and would report a number that the client has not sent.
    fn visit_f64<E: Error>(self, _: f64) -> Result<Nonce, E> {
        Err(E::invalid_type(Unexpected::Other("a float, or an integer beyond 64 bits"), &self))
    }
}
