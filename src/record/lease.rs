//! The statements on a claim that outlives its transaction, sent by its owner. Each statement requires the claim's
//! token, and a record without a response. So the statement of an owner whose claim was taken over finds no row.

use std::time::Duration;

use sqlx::PgConnection;

use super::statement::{Record, changes_a_row, interval};
use crate::Error;
use crate::outcome::Response;

impl Record<'_> {
    /// Prolongs the lease. If less than two leases are left of the retention, prolongs it to two leases, so that a
    /// claim whose owner dies is remembered for at least one lease after it has lapsed. `false` means that the claim is
    /// gone.
    ///
    /// `expires_at` is indexed, but an update that keeps its value is still a heap-only update.
    pub(crate) async fn heartbeat(self, conn: &mut PgConnection, token: i64, lease: Duration) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: heartbeat */ idempotency.record
                set lease_until = pg_catalog.statement_timestamp() + $5::interval,
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $5::interval + $5::interval)
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and lease_until > '-infinity'
                ",
            )
            .bind(token) // $4
            .bind(interval(lease)); // $5
        changes_a_row(conn, update).await
    }

    /// Stores the response. The retention counts from now. `false` means that the claim is gone.
    ///
    /// A completed record never changes. If an owner finds its own response stored under its token, its commit
    /// succeeded and the answer was lost. So this counts that response as stored.
    pub(crate) async fn complete_lease(
        self,
        conn: &mut PgConnection,
        token: i64,
        response: &Response,
        retention: Duration,
    ) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: complete lease */ idempotency.record
                set completed_at = pg_catalog.statement_timestamp(), lease_until = null, steps = null, request = null,
                    looks = null, misdirected = null, granted_attempt = null,
                    response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb,
                    expires_at = pg_catalog.statement_timestamp() + $8::interval
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                ",
            )
            .bind(token) // $4
            .bind(&response.body) // $5
            .bind(response.status) // $6
            .bind(&response.headers) // $7
            .bind(interval(retention)); // $8
        Ok(changes_a_row(&mut *conn, update).await? || self.has_stored(conn, token, response).await?)
    }

    /// Whether this response is stored under this token.
    async fn has_stored(self, conn: &mut PgConnection, token: i64, response: &Response) -> Result<bool, Error> {
        self.query(
            "
            select /* pg_idempotency: has stored */
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
                and token = $4::int8
                and completed_at is not null
                and response_body is not distinct from $5::bytea
                and response_status is not distinct from $6::int2
                and response_headers is not distinct from $7::text::jsonb
            ",
        )
        .bind(token) // $4
        .bind(&response.body) // $5
        .bind(response.status) // $6
        .bind(&response.headers) // $7
        .fetch_optional(conn)
        .await
        .map(|row| row.is_some())
        .map_err(Error::of_statement)
    }
}
