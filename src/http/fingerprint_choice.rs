//! Which parts of a request its fingerprint covers: the default, or the service's choice.

use std::borrow::Cow;
use std::collections::BTreeSet;

use bytes::Bytes;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderName, HeaderValue, Uri, header};
use serde_json::json;

use crate::fingerprint::Pointer;
use crate::{Fingerprint, InvalidBody};

/// Which parts of a request its fingerprint covers.
#[derive(Clone, Default)]
pub(super) struct FingerprintChoice {
    pub(super) compared: Compared,
    /// Sorted, and each once, so that the order in which the service names them does not matter.
    pub(super) headers: Vec<HeaderName>,
}

/// How the request as a whole is compared.
#[derive(Clone, Default)]
pub(super) enum Compared {
    /// `method SP path?query LF body`, byte by byte, so that every language can compute it. Without the content type: a
    /// client that adds a charset in a retry sends the same request.
    #[default]
    Bytes,
    /// Method, path with query, and the body as canonical JSON, without these parts.
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

    /// A text that differs for every choice; `None` for the choices of fingerprint versions 1 and 3, whose digests must
    /// not change. The text is made of JSON lists, because no feature of serde_json changes how those are written.
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

    /// The lines of the chosen headers. The number of lines of each header and the length of each line come first, so
    /// that two different requests never give the same bytes.
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

/// The whole path with its query.
pub(super) fn target(parts: &Parts) -> Cow<'_, str> {
    let target = uri(parts).path_and_query().map_or("", PathAndQuery::as_str);
    // `http://host?query`, of which `http` leaves the path empty.
    if target.starts_with('?') { Cow::Owned(format!("/{target}")) } else { Cow::Borrowed(target) }
}

/// The host of the URI, unless a header `Host` says the same: HTTP/2 names the host only there, and a client of
/// HTTP/1.1 may name it there, too.
pub(super) fn host_of_uri(parts: &Parts) -> Option<&str> {
    let host = uri(parts).authority().map(Authority::as_str)?;
    let is_named = parts.headers.get_all(header::HOST).iter().any(|line| line.as_bytes() == host.as_bytes());
    (!is_named).then_some(host)
}

/// The URI as the client has sent it. A nested axum router cuts the front off `uri`, and that part may name the
/// account.
fn uri(parts: &Parts) -> &Uri {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return &original.0;
    }
    &parts.uri
}
