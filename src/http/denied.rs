//! A refusal of the service itself, in place of a key.

use bytes::Bytes;
use http::{Response, StatusCode};

/// A response of the service itself to a request that it does not admit, from its function for the scope or for the
/// key. A status converts into one with an empty body: `.ok_or(StatusCode::UNAUTHORIZED)?`.
// Boxed, because every successful result would have the size of a response.
#[derive(Debug)]
pub struct Denied(pub(super) Box<Response<Bytes>>);

impl From<Response<Bytes>> for Denied {
    fn from(response: Response<Bytes>) -> Self {
        Self(Box::new(response))
    }
}

impl From<StatusCode> for Denied {
    fn from(status: StatusCode) -> Self {
        let mut response = Response::default();
        *response.status_mut() = status;
        response.into()
    }
}
