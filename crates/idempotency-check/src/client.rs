//! The client: sends the request and its variants over HTTP.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use h2::Reason;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION};
use reqwest::redirect::Policy;
use reqwest::{Body, Client, Method};
use tokio::time::sleep;

use crate::Error;

/// How long the sent part of a body may take to leave the client. A reset discards the bytes that are still in the
/// client.
const LEAVES: Duration = Duration::from_millis(50);

/// The answer of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The HTTP status. A function that does not use HTTP returns 200 for success.
    pub status: u16,
    /// The headers `Content-Type` and `Location`, if the service sent them.
    pub headers: Vec<(String, String)>,
    /// The body, which is compared byte by byte.
    pub body: Vec<u8>,
}

impl Answer {
    /// An answer without headers.
    #[must_use]
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into() }
    }

    pub(crate) fn is_success(&self) -> bool {
        (200..400).contains(&self.status)
    }
}

/// The variant of the request that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    Plain,
    OtherBody,
    OtherUser,
    NoKey,
    OverHttp2,
    CutOff(CutOff),
}

/// An upload that the client cuts off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CutOff {
    /// The code with which the client resets the HTTP/2 stream. `None` if the client closes its HTTP/1.1 connection
    /// instead.
    pub(crate) code: Option<Reason>,
    /// Whether `Content-Length` announces the whole body.
    pub(crate) has_length: bool,
    /// Whether the client sends every byte of the body, so that only the end of the stream is missing. If `false`, the
    /// last byte of the body is missing, too.
    pub(crate) has_every_byte: bool,
}

impl CutOff {
    /// Returns the sent part of this body. The part ends with an error, which cuts the request off.
    fn body(self, mut bytes: Vec<u8>) -> Body {
        bytes.truncate(bytes.len() - usize::from(!self.has_every_byte));
        // hyper resets the stream with the code of this error.
        let code = self.code.unwrap_or(Reason::CANCEL);
        let cut = async move {
            sleep(LEAVES).await;
            Err(h2::Error::from(code))
        };
        Body::wrap_stream(stream::iter([Ok(bytes)]).chain(stream::once(cut)))
    }
}

impl fmt::Display for CutOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = if self.has_every_byte { "every byte of the body" } else { "every byte of the body but one" };
        let length = if self.has_length { "with" } else { "without" };
        write!(f, "the client sent {part}, {length} Content-Length, and ")?;
        match self.code {
            Some(code) => write!(f, "reset the stream with {code:?}"),
            None => f.write_str("closed the connection"),
        }
    }
}

/// A future that returns an answer, or the reason why no answer came.
pub(crate) type Calling<'a> = Pin<Box<dyn Future<Output = Result<Answer, String>> + 'a>>;

/// Sends requests to the service.
pub(crate) trait Caller {
    /// Prepares a request. Returns `None` if this caller cannot send this variant. If the future is dropped, the client
    /// hangs up.
    fn call<'a>(&'a self, key: &str, variant: Variant) -> Option<Calling<'a>>;
}

/// Sends HTTP requests. Each request has a connection of its own, so that the service notices when the client hangs up.
pub(crate) struct Http {
    client: Client,
    http2: Client,
    pub(crate) request: Request,
}

/// The request, in which `{key}` stands for the key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) method: Method,
    pub(crate) url: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Option<String>,
    pub(crate) other_body: Option<String>,
    pub(crate) other_headers: Vec<(String, String)>,
    /// The header that contains the key. `None` if another part of the request contains the key.
    pub(crate) key_header: Option<String>,
}

impl Http {
    pub(crate) fn new(request: Request, timeout: Duration) -> Result<Self, Error> {
        let client =
            || Client::builder().redirect(Policy::none()).no_proxy().pool_max_idle_per_host(0).timeout(timeout);
        let failed = |error: reqwest::Error| Error::Argument(error.to_string());
        let http2 = client().http2_prior_knowledge().build().map_err(failed)?;
        Ok(Self { client: client().http1_only().build().map_err(failed)?, http2, request })
    }
}

impl Caller for Http {
    fn call<'a>(&'a self, key: &str, variant: Variant) -> Option<Calling<'a>> {
        let request = &self.request;
        let mut headers = request.headers.clone();
        let mut body = request.body.as_ref();
        match variant {
            Variant::Plain | Variant::OverHttp2 => {}
            Variant::CutOff(_) => body = Some(request.body.as_ref().filter(|body| !body.is_empty())?),
            Variant::OtherBody => body = Some(request.other_body.as_ref()?),
            Variant::OtherUser if request.other_headers.is_empty() => return None,
            Variant::OtherUser => {
                let replaced =
                    |name: &str| request.other_headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name));
                headers.retain(|(name, _)| !replaced(name));
                headers.extend(request.other_headers.iter().cloned());
            }
            Variant::NoKey => {
                request.key_header.as_ref()?;
            }
        }
        if let Some(name) = request.key_header.as_ref().filter(|_| variant != Variant::NoKey) {
            headers.push((name.clone(), key.to_owned()));
        }
        let with_key = |text: &str| text.replace("{key}", key);
        let mut map = HeaderMap::new();
        for (name, value) in &headers {
            // The name and the value were checked when the arguments were read.
            map.append(HeaderName::try_from(name).ok()?, HeaderValue::try_from(with_key(value)).ok()?);
        }
        let body = body.map(|body| with_key(body));
        let (client, body) = match variant {
            Variant::CutOff(cut) => {
                let body = body?.into_bytes();
                if cut.has_length {
                    map.insert(CONTENT_LENGTH, body.len().into());
                }
                (if cut.code.is_some() { &self.http2 } else { &self.client }, Some(cut.body(body)))
            }
            Variant::OverHttp2 => (&self.http2, body.map(Body::from)),
            _ => (&self.client, body.map(Body::from)),
        };
        let mut sending = client.request(request.method.clone(), with_key(&request.url)).headers(map);
        if let Some(body) = body {
            sending = sending.body(body);
        }
        Some(Box::pin(async move {
            let response = sending.send().await.map_err(reason)?;
            let status = response.status().as_u16();
            let kept = [CONTENT_TYPE, LOCATION].into_iter().filter_map(|name| {
                let value = response.headers().get(&name)?;
                Some((name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            });
            let headers = kept.collect();
            let body = response.bytes().await.map_err(reason)?.to_vec();
            Ok(Answer { status, headers, body })
        }))
    }
}

fn reason(error: reqwest::Error) -> String {
    if error.is_timeout() {
        "no answer in time".to_owned()
    } else if error.is_connect() {
        "connection refused".to_owned()
    } else {
        "the connection was closed without an answer".to_owned()
    }
}

/// Changes the first number of the body, or else its first string. The service can still parse the changed body.
pub(crate) fn other_body(body: &str) -> Option<String> {
    let bytes = body.as_bytes();
    let mut in_string = false;
    for (at, &byte) in bytes.iter().enumerate() {
        in_string ^= byte == b'"' && (at == 0 || bytes[at - 1] != b'\\');
        let begins = at == 0 || matches!(bytes[at - 1], b':' | b'=' | b'[' | b',' | b' ' | b'-');
        if byte.is_ascii_digit() && begins && !in_string {
            let length = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            return Some(changed(body, at + length - 1));
        }
    }
    // A value follows a colon, a bracket or an equals sign. If a JSON body has no number, only the first letter or
    // digit of a string is changed, because `true` with a changed letter would not be valid JSON.
    let is_json = body.starts_with(['{', '[']);
    let values = body.match_indices([':', '[', '=']).filter_map(|(at, _)| {
        let value = body[at + 1..].trim_start();
        let at = body.len() - value.len();
        let is_string = value.starts_with('"');
        let at = if is_string { at + 1 } else { at };
        (is_string || !is_json).then_some(())?;
        (!body[at..].starts_with("{key}") && bytes.get(at).is_some_and(u8::is_ascii_alphanumeric)).then_some(at)
    });
    let first = values.into_iter().next().or_else(|| (!is_json).then_some(0))?;
    bytes.get(first).filter(|byte| byte.is_ascii_alphanumeric()).map(|_| changed(body, first))
}

/// Replaces the letter or digit at this place by another one.
fn changed(body: &str, at: usize) -> String {
    let mut bytes = body.as_bytes().to_vec();
    bytes[at] = match bytes[at] {
        b'9' => b'8',
        b'z' => b'y',
        b'Z' => b'Y',
        other => other + 1,
    };
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::other_body;

    #[test]
    fn the_first_number_or_string_is_changed() {
        for (body, other) in [
            (r#"{"amount":100,"currency":"USD"}"#, Some(r#"{"amount":101,"currency":"USD"}"#)),
            (r#"{"id2": "a1", "amount": -9.5}"#, Some(r#"{"id2": "a1", "amount": -8.5}"#)),
            (r#"{"name":"ada"}"#, Some(r#"{"name":"bda"}"#)),
            (r#"{"gift":true,"name":"ada"}"#, Some(r#"{"gift":true,"name":"bda"}"#)),
            (r#"{"key":"{key}","name":"ada"}"#, Some(r#"{"key":"{key}","name":"bda"}"#)),
            ("amount=100&to=b", Some("amount=101&to=b")),
            ("to=bob", Some("to=cob")),
            ("hello", Some("iello")),
            ("{}", None),
        ] {
            assert_eq!(other_body(body).as_deref(), other, "{body}");
        }
    }
}
