//! A response as its record stores it.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

/// A body of JSON text, or, over HTTP, a status, headers and a body.
///
/// If the service chose not to store an HTTP response, the record has its status, and no body. If it chose a reference,
/// the body is that reference, from which a replay rebuilds the response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: Option<i16>,
    /// JSON text.
    pub(crate) headers: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
}

impl Response {
    /// Reads the three columns of the response.
    pub(crate) fn of(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            status: row.try_get("response_status")?,
            headers: row.try_get("response_headers")?,
            body: row.try_get("response_body")?,
        })
    }
}
