//! The version of a passenger's list of orders: `ETag` where it is read, `If-Match` where it is added to.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::header;
use axum::http::request::Parts;

/// What the client's view of its orders is; nothing where it does not care.
pub(crate) struct IfMatch(Option<String>);

pub(crate) fn etag(version: i64) -> String {
    format!("\"{version}\"")
}

impl IfMatch {
    pub(crate) fn holds(&self, version: i64) -> bool {
        let Self(Some(tags)) = self else { return true };
        tags.split(',').any(|tag| tag.trim() == "*" || tag.trim() == etag(version))
    }
}

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        // What is no text matches nothing.
        let tags = parts.headers.get(header::IF_MATCH).map(|tags| tags.to_str().unwrap_or_default().to_owned());
        Ok(Self(tags))
    }
}
