//! Reads the parts of a request that the layer needs: its operation, its key, its fingerprint, and the form in which
//! the request is stored for a resumer.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri, header};
use serde_json::json;

use crate::fingerprint::Pointer;
use crate::key::Check;
use crate::lease::InDoubt;
use crate::record::ShownRequest;
use crate::route::without_names;
use crate::{Fingerprint, InvalidBody, InvalidKey, Key, KeyPart};

/// `Idempotency-Key`.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What the layer has read of a request with a key.
pub(super) struct Ticket {
    pub(super) key: Arc<Key>,
    pub(super) fingerprint: Fingerprint,
    /// The arrival of the request. A record that has expired at the arrival is ignored. A record that expires after the
    /// arrival still gives the answer.
    pub(super) arrived: Instant,
    /// The request as the claim stores it, so that a resumer can finish it.
    pub(super) stored: Option<Vec<u8>>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MalformedKey {
    /// There are several header lines, or a proxy has joined them with a comma. Using the first line would hide a
    /// mistake.
    #[error("there are several Idempotency-Key values; send one")]
    Several,
    /// The key is empty, is longer than 255 bytes, or has only white space. If the key does not come from the
    /// header, the fault may also be a control character, or a text of only invisible characters. An
    /// [operation](super::IdempotencyLayer::operation) that contains a part of the request's path can have the same
    /// faults as the value of a key.
    #[error("the Idempotency-Key cannot be used: {0}")]
    Invalid(#[from] InvalidKey),
    #[error("the Idempotency-Key is neither a quoted string (RFC 9651) nor a word of visible ASCII; send \"a-uuid\"")]
    NeitherStringNorWord,
    /// The key is shorter than the [shortest](super::IdempotencyLayer::shortest_key) that the service accepts.
    #[error(
        "the Idempotency-Key has fewer than {shortest} characters; send one that cannot be guessed, such as a UUID"
    )]
    TooShort { shortest: usize },
    /// Parameters follow the quoted string, but this header does not allow parameters.
    #[error("the Idempotency-Key has parameters after the string; send the string alone")]
    Parameters,
}

/// Returns the method and the route that axum has matched, without the names of the route's parameters. If the
/// operation contained these names, a renamed parameter would make every key new, and a retry would be performed again.
pub(super) fn matched_operation(parts: &Parts) -> Option<String> {
    #[cfg(feature = "axum")]
    let route = parts.extensions.get().map(axum::extract::MatchedPath::as_str);
    #[cfg(not(feature = "axum"))]
    let route: Option<&str> = None;
    Some([parts.method.as_str(), " ", &without_names(route?)].concat())
}

/// Returns the line of this header, if there is exactly one line.
pub(super) fn only_line<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h HeaderValue> {
    let mut lines = headers.get_all(name).iter();
    lines.next().filter(|_| lines.next().is_none())
}

/// Reads the value of `Idempotency-Key`. The value is a quoted string of structured fields (RFC 9651), as the draft
/// demands, or a bare word, which most clients send. `"abc"` and `abc` are the same value. Returns `None` if there is
/// no such header. `check` is the rule for the text of the value.
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

/// Reads a bare word of visible ASCII. A word must not contain a comma or a semicolon, which separate values and
/// parameters in structured fields. So a list, or a value with parameters, is never read as a word.
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

#[derive(Clone, Default)]
pub(super) struct FingerprintChoice {
    pub(super) compared: Compared,
    /// The headers of the fingerprint, sorted and without duplicates, because the service may name them in any order.
    pub(super) headers: Vec<HeaderName>,
}

#[derive(Clone, Default)]
pub(super) enum Compared {
    /// Compares `method SP path?query LF body`, byte by byte, so that every language can compute the fingerprint. The
    /// content type does not count, because a client that adds a charset in a retry sends the same request.
    #[default]
    Bytes,
    /// Compares the method, the path with its query, and the body as canonical JSON without the ignored parts.
    Json { ignored: BTreeSet<Pointer> },
}

impl FingerprintChoice {
    pub(super) fn add_header(&mut self, name: HeaderName) {
        self.headers.push(name);
        self.headers.sort_by(|one, other| one.as_str().cmp(other.as_str()));
        self.headers.dedup();
    }

    pub(super) fn fingerprint(&self, parts: &Parts, data: &Bytes) -> Result<Fingerprint, InvalidBody> {
        let compared = match &self.compared {
            Compared::Bytes => Fingerprint::of_request(parts.method.as_str(), &target(parts), data),
            Compared::Json { ignored } => {
                let body = Fingerprint::of_json_without(data, ignored)?;
                Fingerprint::of_json_request(parts.method.as_str(), &target(parts), &body)
            }
        };
        Ok(match self.described() {
            None => compared,
            Some(choice) => Fingerprint::of_choice(choice.as_bytes(), &compared, &self.lines(parts)),
        })
    }

    /// Returns a text that is different for each `FingerprintChoice`. Returns `None` for a choice whose fingerprints
    /// have version 1 or 3, because the digests of these versions must not change. The text consists of JSON lists,
    /// because no feature of serde_json changes how lists are written.
    fn described(&self) -> Option<String> {
        let compared = match &self.compared {
            Compared::Bytes if self.headers.is_empty() => return None,
            Compared::Bytes => json!(["bytes"]),
            Compared::Json { ignored } if ignored.is_empty() && self.headers.is_empty() => return None,
            Compared::Json { ignored } if ignored.is_empty() => json!(["json"]),
            Compared::Json { ignored } => {
                json!(["json without", ignored.iter().map(Pointer::tokens).collect::<Vec<_>>()])
            }
        };
        let headers: Vec<_> = self.headers.iter().map(HeaderName::as_str).collect();
        Some(json!([compared, headers]).to_string())
    }

    /// Returns the lines of the chosen headers. Each header begins with the number of its lines, and each line begins
    /// with its length, so that different headers never give the same bytes.
    fn lines(&self, parts: &Parts) -> Vec<u8> {
        let mut written = Vec::new();
        for name in &self.headers {
            let mut lines: Vec<_> = parts.headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
            lines.extend(host_of_uri(parts).filter(|_| *name == header::HOST).map(str::as_bytes));
            written.extend((lines.len() as u64).to_be_bytes());
            for line in lines {
                written.extend((line.len() as u64).to_be_bytes());
                written.extend(line);
            }
        }
        written
    }
}

fn target(parts: &Parts) -> Cow<'_, str> {
    let target = uri(parts).path_and_query().map_or("", PathAndQuery::as_str);
    // For the URI `http://host?query`, the crate `http` leaves the path empty.
    if target.starts_with('?') { Cow::Owned(format!("/{target}")) } else { Cow::Borrowed(target) }
}

/// Returns the host of the URI, unless a header `Host` has the same value. HTTP/2 names the host only in the URI, and a
/// client of HTTP/1.1 may also name it there.
fn host_of_uri(parts: &Parts) -> Option<&str> {
    let host = uri(parts).authority().map(Authority::as_str)?;
    let is_named = parts.headers.get_all(header::HOST).iter().any(|line| line.as_bytes() == host.as_bytes());
    (!is_named).then_some(host)
}

/// Returns the URI as the client has sent it. A nested axum router cuts the front off `uri`, and this front may name
/// the account.
fn uri(parts: &Parts) -> &Uri {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return &original.0;
    }
    &parts.uri
}

/// The headers that are stored with each request: two that the handler needs to read the body, and the key.
pub(super) const STORED: [HeaderName; 3] = [header::CONTENT_TYPE, header::CONTENT_ENCODING, IDEMPOTENCY_KEY];

/// The headers that prove who the client is. The table, the WAL and the backups must not contain such a proof.
pub(super) const NEVER_STORED: [HeaderName; 3] = [header::AUTHORIZATION, header::COOKIE, header::PROXY_AUTHORIZATION];

/// Returns the request as it is stored, with the headers that `is_stored` selects. The caller has checked the limit of
/// the body. The error is the status of the layer's response, if the head is too large, or if a resumer could not
/// restore the target. For example, the target of a request to open a tunnel cannot be restored.
pub(super) fn to_store(
    parts: &Parts,
    body: &[u8],
    is_stored: impl Fn(&HeaderName) -> bool,
) -> Result<Vec<u8>, StatusCode> {
    let target = target(parts).into_owned();
    target.parse::<Uri>().map_err(|_| StatusCode::BAD_REQUEST)?;
    let sent = parts.headers.iter().map(|(name, value)| (name, value.as_bytes()));
    // A resumed request has only the path and the query of the URI, so the host is stored as a header.
    let sent = sent.chain(host_of_uri(parts).map(|host| (&header::HOST, host.as_bytes())));
    let kept = sent.filter(|(name, _)| is_stored(name) && !NEVER_STORED.contains(name));
    let kept = kept.map(|(name, value)| (name.to_string(), as_text(value)));
    let request = ShownRequest::new(parts.method.to_string(), target, kept.collect());
    request.with_body(body).ok_or(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE)
}

/// Restores a stored request. Returns `None` if the stored bytes do not have the form that [`to_store`] writes.
pub(super) fn restored(stored: &[u8]) -> Option<Request<Bytes>> {
    let (head, body) = ShownRequest::read(stored)?;
    let mut request =
        Request::builder().method(&*head.method).uri(head.target).body(Bytes::copy_from_slice(body)).ok()?;
    *request.headers_mut() = headers_of(head.headers)?;
    Some(request)
}

/// Returns the value of a header as text, with one character for each byte, as in ISO 8859-1. The value of a header may
/// contain any byte, but the text of JSON is Unicode.
pub(super) fn as_text(value: &[u8]) -> String {
    value.iter().copied().map(char::from).collect()
}

/// Restores the headers whose values [`as_text`] has written. Returns `None` if a name or a value is damaged.
pub(super) fn headers_of(stored: Vec<(String, String)>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in stored {
        let value: Vec<u8> = value.chars().map(u8::try_from).collect::<Result<_, _>>().ok()?;
        headers.try_append(name.parse::<HeaderName>().ok()?, HeaderValue::from_bytes(&value).ok()?).ok()?;
    }
    Some(headers)
}

impl InDoubt {
    /// Returns the stored request of a leased layer, with its body. `None` if the operation is not behind a layer, or
    /// if the request is damaged or comes from a newer release.
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    #[must_use]
    pub fn http_request(&self) -> Option<Request<Bytes>> {
        restored(&self.request)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/http/request.rs"]
mod tests;
