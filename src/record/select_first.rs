//! The option *select first*: a replay in one round trip, before any transaction begins.

use sqlx::{PgConnection, Row as _};

use super::claim::Terms;
use super::statement::{Record, Response};

impl Record<'_> {
    /// Looks for a stored response, and returns it with its fingerprint.
    ///
    /// Returns `None` too if the connection is in an open transaction that has written something: the row that it sees may
    /// not be committed.
    pub(crate) async fn stored_response(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
    ) -> sqlx::Result<Option<(Vec<u8>, Response)>> {
        self.query(
            "
            select fingerprint, response_status, response_headers::text as response_headers, response_body
            from idempotency.record
            where scope = $1::text and operation = $2::text and key = $3::text
                and mode = $4::text
                and completed_at is not null
                and expires_at > pg_catalog.statement_timestamp()
                and pg_catalog.pg_current_xact_id_if_assigned() is null
            ",
        )
        .bind(terms.mode.as_str())
        .try_map(|row| Ok((row.try_get("fingerprint")?, Response::of(&row)?)))
        .fetch_optional(conn)
        .await
    }
}
