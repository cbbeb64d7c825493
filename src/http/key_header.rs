//! The value of the header `Idempotency-Key`.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::key::Check;
use crate::{InvalidKey, KeyPart};

/// `Idempotency-Key`.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Why the layer refused the key of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MalformedKey {
    /// There are several header lines, or a proxy has joined them with a comma. Taking the first would hide a mistake.
    #[error("there are several Idempotency-Key values; send one")]
    Several,
    /// The key is empty, is longer than 255 bytes, or has white space only. A key that does not come from the header
    /// may also contain a control character, or invisible characters only. Or this is so of the
    /// [operation](super::IdempotencyLayer::operation), which may contain a part of the path.
    #[error("the Idempotency-Key cannot be used: {0}")]
    Invalid(#[from] InvalidKey),
    /// The value is neither a string of structured fields nor a bare word.
    #[error("the Idempotency-Key is neither a quoted string (RFC 9651) nor a word of visible ASCII; send \"a-uuid\"")]
    NeitherStringNorWord,
    /// The key has fewer characters than the [shortest](super::IdempotencyLayer::shortest_key) that the service takes.
    #[error("the Idempotency-Key has fewer than {shortest} characters; send one that nobody guesses, such as a UUID")]
    #[non_exhaustive]
    TooShort {
        /// The fewest characters of a key.
        shortest: usize,
    },
    /// The quoted string has parameters after it, which this header does not allow.
    #[error("the Idempotency-Key has parameters after the string; send the string alone")]
    Parameters,
}

/// The line of this header, if there is exactly one.
pub(super) fn only_line<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h HeaderValue> {
    let mut lines = headers.get_all(name).iter();
    lines.next().filter(|_| lines.next().is_none())
}

/// Reads the value of `Idempotency-Key`: a quoted string of structured fields (RFC 9651), as the draft demands, or a
/// bare word, which most clients send. `"abc"` and `abc` are the same value. `None` if there is no such header. `check`
/// is the rule for its text.
pub(super) fn key_value(headers: &HeaderMap, check: Check) -> Result<Option<String>, MalformedKey> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(MalformedKey::Several);
    }
    let line = line.as_bytes().trim_ascii();
    let value = match line.strip_prefix(b"\"") {
        Some(rest) => string(rest)?,
        None => word(line)?,
    };
    Ok(Some(check(KeyPart::Value, value)?))
}

/// Parses the part after the opening quote, by RFC 9651, section 4.2.5.
fn string(rest: &[u8]) -> Result<String, MalformedKey> {
    let mut value = String::new();
    let mut bytes = rest.iter();
    loop {
        match bytes.next() {
            Some(b'\\') => match bytes.next() {
                Some(&escaped @ (b'"' | b'\\')) => value.push(char::from(escaped)),
                _ => return Err(MalformedKey::NeitherStringNorWord),
            },
            Some(b'"') => break,
            Some(&plain @ b' '..=b'~') => value.push(char::from(plain)),
            _ => return Err(MalformedKey::NeitherStringNorWord),
        }
    }
    match bytes.as_slice().trim_ascii_start().first() {
        None => Ok(value),
        Some(b';') => Err(MalformedKey::Parameters),
        Some(b',') => Err(MalformedKey::Several),
        Some(_) => Err(MalformedKey::NeitherStringNorWord),
    }
}

/// Visible ASCII, without the marks that separate values and parameters: a word is then never another structured field.
fn word(line: &[u8]) -> Result<String, MalformedKey> {
    if line.contains(&b',') {
        return Err(MalformedKey::Several);
    }
    if line.contains(&b';') {
        return Err(MalformedKey::Parameters);
    }
    match str::from_utf8(line) {
        Ok(word) if word.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"') => Ok(word.to_owned()),
        _ => Err(MalformedKey::NeitherStringNorWord),
    }
}

#[cfg(test)]
#[path = "../../tests/unit/http/key_header.rs"]
mod tests;
