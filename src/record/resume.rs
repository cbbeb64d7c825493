//! Operations that a resumer may take over, and their stored requests.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::fragment::{attempts_are_left, may_be_retried};
use super::statement::{self, Record, changes_a_row, interval};
use crate::{Deployment, Error, Fingerprint, Key, Mode};

/// The number of candidates of one search. A resumer that loses one to another caller tries the next.
const CANDIDATES: i64 = 16;

/// An operation that seems free to be resumed. The claim decides.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) key: Key,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) attempt: i32,
}

impl Candidate {
    /// The operations that nobody has worked on for `after`, doubled for each attempt; the oldest claim first.
    pub(crate) async fn all(
        conn: &mut PgConnection,
        deployment: Deployment,
        operation: &str,
        mode: Mode,
        max_attempts: i32,
        after: Duration,
    ) -> Result<Vec<Self>, Error> {
        let rows = sqlx::query(concat! {
            "
            select scope, value, fingerprint, attempt
            from idempotency.record
            where operation = $1::text
                and request is not null
                and mode in ('at_least_once', $2::text)
                and ", may_be_retried!(), "
                -- After its retention the key is new, and its stored steps do not count.
                and expires_at > pg_catalog.statement_timestamp()
                and ", attempts_are_left!("$3"), "
                and claimed_at <= pg_catalog.statement_timestamp() - $4::interval * pg_catalog.power(2, least(attempt - 1, 20))
            order by claimed_at
            limit $5::int8
            ",
        })
        .persistent(deployment.prepared)
        .bind(operation) // $1
        .bind(mode.as_str()) // $2
        .bind(max_attempts) // $3
        .bind(interval(after)) // $4
        .bind(CANDIDATES) // $5
        .try_map(|row: PgRow| {
            let key = statement::stored_key(&row, operation)?;
            let fingerprint = Fingerprint::stored(row.try_get("fingerprint")?);
            Ok(key.zip(fingerprint).zip(row.try_get("attempt")?))
        })
        .fetch_all(conn)
        .await
        .map_err(Error::of_statement)?;
        // A fingerprint of another length is a newer release's, and that release resumes the operation.
        Ok(rows.into_iter().flatten().map(|((key, fingerprint), attempt)| Self { key, fingerprint, attempt }).collect())
    }
}

impl Record<'_> {
    /// Stores the request, unless an earlier attempt has stored it.
    ///
    /// This is a statement of its own, so that claims without a stored request stay as short as they are.
    pub(crate) async fn store_request(self, conn: &mut PgConnection, token: i64, request: &[u8]) -> Result<(), Error> {
        let update = self
            .query(
                "
                update idempotency.record
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

    /// The stored request. `None` if there is none, or the claim is gone.
    pub(crate) async fn request(self, conn: &mut PgConnection, token: i64) -> Result<Option<Vec<u8>>, Error> {
        self.query(
            "
            select request
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
                and token = $4::int8
                and completed_at is null
                and request is not null
            ",
        )
        .bind(token) // $4
        .try_map(|row: PgRow| row.try_get("request"))
        .fetch_optional(conn)
        .await
        .map_err(Error::of_statement)
    }
}
