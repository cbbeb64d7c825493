//! What makes two requests the same: the default, or what the service chooses.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, header};
use serde_json::json;

use crate::fingerprint::pointer::{Pointer, without};
use crate::fingerprint::request::Content;
use crate::{Fingerprint, InvalidBody};

pub(super) type FingerprintOf = dyn Fn(&Parts, &Bytes) -> Result<Fingerprint, InvalidBody> + Send + Sync;

/// What a service has chosen.
#[derive(Clone, Default)]
pub(super) struct Choice {
    pub(super) compared: Compared,
    /// By their names, each once: in which order they were told does not count.
    pub(super) headers: Vec<HeaderName>,
}

/// Where the request as a whole is compared.
#[derive(Clone, Default)]
pub(super) enum Compared {
    /// Method, path with query, content type, and the body byte by byte.
    #[default]
    Bytes,
    /// Method, path with query, and the body as canonical JSON.
    CanonicalJson,
    /// As [`CanonicalJson`](Self::CanonicalJson), without some parts of the body.
    JsonWithout(BTreeSet<Pointer>),
    /// What this function takes, and nothing else.
    Function { name: String, function: Arc<FingerprintOf> },
}

impl Choice {
    pub(super) fn add_header(&mut self, name: HeaderName) {
        self.headers.push(name);
        self.headers.sort_by(|one, other| one.as_str().cmp(other.as_str()));
        self.headers.dedup();
    }

    pub(super) fn fingerprint(&self, parts: &Parts, data: &Bytes) -> Result<Fingerprint, InvalidBody> {
        let of_content = |content| fingerprint(&parts.method, &target(parts), &parts.headers, content);
        let compared = match &self.compared {
            Compared::Bytes => of_content(Content::Bytes(data)),
            Compared::CanonicalJson => of_content(Content::Json(data)),
            Compared::JsonWithout(pointers) => of_content(Content::Json(&without(data, pointers)?)),
            Compared::Function { function, .. } => function(parts, data),
        }?;
        Ok(match self.described() {
            None => compared,
            Some(choice) => Fingerprint::of_choice(choice.as_bytes(), &compared, &self.lines(&parts.headers)),
        })
    }

    /// What tells this choice from every other one; nothing for those of the first version, whose digests stay as they are.
    /// JSON lists, which no feature of serde_json's writes in another way.
    fn described(&self) -> Option<String> {
        let compared = match &self.compared {
            Compared::Bytes | Compared::CanonicalJson if self.headers.is_empty() => return None,
            Compared::Bytes => json!(["bytes"]),
            Compared::CanonicalJson => json!(["json"]),
            Compared::JsonWithout(pointers) => {
                json!(["json without", pointers.iter().map(Pointer::tokens).collect::<Vec<_>>()])
            }
            Compared::Function { name, .. } => json!(["function", name]),
        };
        let headers: Vec<_> = self.headers.iter().map(HeaderName::as_str).collect();
        Some(json!([compared, headers]).to_string())
    }

    /// The lines of the chosen headers: for each header their number, and each behind its length, so that no two requests
    /// run together.
    fn lines(&self, headers: &HeaderMap) -> Vec<u8> {
        let mut written = Vec::new();
        for name in &self.headers {
            let lines: Vec<_> = headers.get_all(name).iter().collect();
            written.extend((lines.len() as u64).to_be_bytes());
            for line in lines {
                written.extend((line.len() as u64).to_be_bytes());
                written.extend(line.as_bytes());
            }
        }
        written
    }
}

fn fingerprint(
    method: &Method,
    target: &str,
    headers: &HeaderMap,
    content: Content<'_>,
) -> Result<Fingerprint, InvalidBody> {
    let content_type = match content {
        // It is JSON, whatever it says: a charset that comes and goes is no other request.
        Content::Json(_) => None,
        Content::Bytes(_) => headers.get(header::CONTENT_TYPE),
    };
    let content_type = content_type.map_or(&b""[..], |value| value.as_bytes());
    Fingerprint::of_request([method.as_str().as_bytes(), target.as_bytes(), content_type], content)
}

/// The fingerprint of a request as a layer without further settings takes it.
#[cfg(feature = "testing")]
pub(crate) fn plain_fingerprint<B: AsRef<[u8]>>(request: &http::Request<B>) -> Result<Fingerprint, InvalidBody> {
    let target = request.uri().path_and_query().map_or("", |target| target.as_str());
    fingerprint(request.method(), target, request.headers(), Content::Bytes(request.body().as_ref()))
}

/// The path with its query, from the root: a nested router of axum's has cut the front off `uri`, and with it whose account
/// it is.
fn target(parts: &Parts) -> String {
    #[cfg(feature = "axum")]
    let uri = parts.extensions.get::<axum::extract::OriginalUri>().map_or(&parts.uri, |original| &original.0);
    #[cfg(not(feature = "axum"))]
    let uri = &parts.uri;
    uri.path_and_query().map_or_else(String::new, |target| target.as_str().to_owned())
}
