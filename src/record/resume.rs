//! Operations that a resumer may take over, and their stored requests.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

#[cfg(feature = "http")]
use super::ends::storable;
use super::statement::{self, Record, changes_a_row, interval, may_be_retried};
use crate::{Error, Fingerprint, Key, Mode};

/// The number of rows in one page of a search. A resumer that loses a candidate to another caller tries the next
/// candidate.
const CANDIDATES: i64 = 16;

/// The form of a stored request. A search selects only the requests of one form. Otherwise, requests of the other form
/// could fill the pages of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredAs {
    Json,
    #[cfg(feature = "http")]
    Envelope,
}

impl StoredAs {
    /// The lowest and the highest value of the first byte of a request in this form.
    pub(super) fn first_bytes(self) -> [&'static [u8]; 2] {
        match self {
            Self::Json => [b"\t", b"\xff"],
            #[cfg(feature = "http")]
            Self::Envelope => [&[VERSION], &[VERSION]],
        }
    }
}

/// An operation that a resumer can try to claim. Only the claim decides whether the operation is free.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) key: Key,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) attempt: i32,
    pub(crate) token: i64,
}

impl Candidate {
    /// A page of the operations that a resumer can try, the oldest claim first, and the number of rows before the next
    /// page. This number is `None` for the last page. The age of the last claim must be at least `after`. The time
    /// `after` doubles with each attempt. Leaves out the first `skipped` rows.
    #[allow(clippy::too_many_arguments, reason = "each is a parameter of the statement")]
    pub(crate) async fn page(
        conn: &mut PgConnection,
        persistent: bool,
        operation: &str,
        mode: Mode,
        max_attempts: i32,
        after: Duration,
        stored_as: StoredAs,
        skipped: i64,
    ) -> Result<(Vec<Self>, Option<i64>), Error> {
        let sql = concat! {
            "
            select /* pg_idempotency: candidates */
                scope, value, fingerprint, attempt, token
            from idempotency.record
            where operation = $1::text
                and request is not null
                -- It reads one byte of a request that may be large.
                and pg_catalog.substr(request, 1, 1) between $6::bytea and $7::bytea
                and mode = $2::text
                and ", may_be_retried!(), "
                -- After its retention the key is new, and its stored steps do not count.
                and expires_at > pg_catalog.statement_timestamp()
                and attempt < greatest($3::int4, granted_attempt)
                and claimed_at <= pg_catalog.statement_timestamp() - $4::interval * pg_catalog.power(2,
                    -- The time does not overflow, whatever was written into the row by hand.
                    least(greatest(attempt, 1) - 1, 20))
            order by claimed_at
            limit $5::int8 offset $8::int8
            ",
        };
        let page = sqlx::query(sql)
            .persistent(persistent)
            .bind(operation) // $1
            .bind(mode.as_str()) // $2
            .bind(max_attempts) // $3
            .bind(interval(after)) // $4
            .bind(CANDIDATES) // $5
            .bind(stored_as.first_bytes()[0]) // $6
            .bind(stored_as.first_bytes()[1]) // $7
            .bind(skipped) // $8
            .try_map(|row: PgRow| Ok(statement::or_left_out(operation, Self::of(&row, operation))))
            .fetch_all(conn)
            .await
            .map_err(Error::of_statement)?;
        let is_full = i64::try_from(page.len()).is_ok_and(|rows| rows >= CANDIDATES);
        Ok((page.into_iter().flatten().collect(), is_full.then_some(skipped + CANDIDATES)))
    }

    /// `None` for a row whose key no caller can have. Also `None` for a fingerprint whose length differs from that of
    /// this release. A newer release wrote such a fingerprint, and that release resumes the operation.
    fn of(row: &PgRow, operation: &str) -> sqlx::Result<Option<Self>> {
        let key = statement::stored_key(row, operation)?;
        let fingerprint = Fingerprint::stored(row.try_get("fingerprint")?);
        let (attempt, token) = (row.try_get("attempt")?, row.try_get("token")?);
        Ok(key.zip(fingerprint).map(|(key, fingerprint)| Self { key, fingerprint, attempt, token }))
    }
}

impl Record<'_> {
    /// Stores the request, unless an earlier attempt has stored it.
    ///
    /// A separate statement stores the request, so that claims without a stored request stay short.
    pub(crate) async fn store_request(self, conn: &mut PgConnection, token: i64, request: &[u8]) -> Result<(), Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: store request */ idempotency.record
                set request = $5::bytea
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and request is null
                ",
            )
            .bind(token) // $4
            .bind(request); // $5
        changes_a_row(conn, update).await.map(drop)
    }

    /// Deletes a stored request that the service refuses, and stores the reason. The operation, which must have no
    /// owner, then waits for its caller or for an operator. Returns `false` if the record has changed.
    #[cfg(feature = "http")]
    pub(crate) async fn refuse_request(self, conn: &mut PgConnection, token: i64, reason: &str) -> Result<bool, Error> {
        let update = self
            .query(concat! {
                "
                update /* pg_idempotency: refuse request */ idempotency.record
                set request = null, probes = null, last_error = 'refused: '::text || $5::text
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    -- As in `not_expired`, no index may match the condition.
                    and (request is not null) is true
                    and ", may_be_retried!(), "
                ",
            })
            .bind(token) // $4
            .bind(storable(reason)); // $5
        changes_a_row(conn, update).await
    }

    /// The stored request. `None` if no request is stored, or if the claim is gone.
    pub(crate) async fn request(self, conn: &mut PgConnection, token: i64) -> Result<Option<Vec<u8>>, Error> {
        self.query(
            "
            select /* pg_idempotency: read request */ request
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
                and token = $4::int8
                and completed_at is null
                -- As in `not_expired`, no index may match the condition.
                and (request is not null) is true
            ",
        )
        .bind(token) // $4
        .try_map(|row: PgRow| row.try_get("request"))
        .fetch_optional(conn)
        .await
        .map_err(Error::of_statement)
    }
}

/// The first byte of a request that a leased HTTP layer has stored. The next two bytes are the length of the head. Then
/// come the head as JSON, and the body as it was received. The other stored requests are JSON, which never begins with
/// a byte below the tab.
///
/// The form has no column of its own, because every claim would have to write this column.
const VERSION: u8 = 1;
/// The number of bytes for the version and the length of the head.
const PREFIX: usize = 3;

/// The request of an operation behind a leased HTTP layer, without its body.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShownRequest {
    /// The method.
    pub method: String,
    /// The path with its query.
    pub target: String,
    /// The stored headers. A header's value has one character for each of its bytes.
    pub headers: Vec<(String, String)>,
}

impl ShownRequest {
    #[cfg(feature = "http")]
    pub(crate) fn new(method: String, target: String, headers: Vec<(String, String)>) -> Self {
        Self { method, target, headers }
    }

    /// Encodes the request with its body. `None` if the head has more than 65,535 bytes.
    #[cfg(feature = "http")]
    pub(crate) fn with_body(&self, body: &[u8]) -> Option<Vec<u8>> {
        let head = serde_json::to_vec(&(&self.method, &self.target, &self.headers)).ok()?;
        let length = u16::try_from(head.len()).ok()?.to_be_bytes();
        Some([&[VERSION], &length[..], &head, body].concat())
    }

    /// Separates the head from the body. `None` if the bytes are not a request of a layer, or if a newer release wrote
    /// them.
    pub(crate) fn read(stored: &[u8]) -> Option<(Self, &[u8])> {
        let (&[VERSION, high, low], rest) = stored.split_first_chunk::<PREFIX>()? else { return None };
        let (head, body) = rest.split_at_checked(u16::from_be_bytes([high, low]).into())?;
        let (method, target, headers) = serde_json::from_slice(head).ok()?;
        Some((Self { method, target, headers }, body))
    }
}
