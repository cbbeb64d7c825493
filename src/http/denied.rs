//! What a function of the service's answers in place of the handler.

use bytes::Bytes;
use http::{Response, StatusCode};

/// A response of the service's own to a request that it does not let in: by its function for the scope or for the key.
///
/// ```
/// # use http::StatusCode;
/// # use pg_idempotency::http::Denied;
/// fn scope(user: Option<&str>) -> Result<String, Denied> {
///     Ok(user.ok_or(StatusCode::UNAUTHORIZED)?.to_owned())
/// }
/// ```
// Boxed, because every good call would carry a response's size in its result.
#[derive(Debug)]
pub struct Denied(pub(super) Box<Response<Bytes>>);

impl From<Response<Bytes>> for Denied {
    fn from(response: Response<Bytes>) -> Self {
        Self(Box::new(response))
    }
}

/// The status alone, with an empty body.
impl From<StatusCode> for Denied {
    fn from(status: StatusCode) -> Self {
        let mut response = Response::default();
        *response.status_mut() = status;
        response.into()
    }
}
