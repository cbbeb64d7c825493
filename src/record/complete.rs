//! The end of a claim in transaction mode: completion, or release.

use sqlx::PgConnection;

use super::draw_token;
use super::{Claim, Record, Response};
use crate::Error;

impl Record<'_> {
    /// Stores the response. Demands the claim's token and the claim's own transaction (`claimed_at = now()`): a COMMIT or
    /// ROLLBACK inside `perform` is [`Error::NotInTransaction`], and nothing is acknowledged. Because it is a write, it also
    /// fails in an aborted transaction, whose COMMIT would succeed without saving anything.
    pub(crate) async fn complete(
        self,
        conn: &mut PgConnection,
        claim: Claim,
        response: &Response,
    ) -> Result<(), Error> {
        let updated = self
            .query(
                "
                update idempotency.record
                set completed_at = pg_catalog.statement_timestamp(),
                    response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and claimed_at = pg_catalog.now()
                    and expires_at > pg_catalog.statement_timestamp()
                ",
            )
            .bind(claim.token)
            .bind(&response.body)
            .bind(response.status)
            .bind(&response.headers)
            .execute(&mut *conn)
            .await
            .map_err(Error::of_statement)?;
        if updated.rows_affected() == 1 {
            return Ok(());
        }
        // Off the ordinary path: why there was no such row.
        let still_ours = self
            .query(
                "
                select
                from idempotency.record
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and claimed_at = pg_catalog.now()
                ",
            )
            .bind(claim.token)
            .fetch_optional(conn)
            .await
            .map_err(Error::of_statement)?;
        Err(if still_ours.is_some() { Error::OutlivedRetention } else { Error::NotInTransaction })
    }

    /// Gives the claim up unperformed: the next caller may claim at once. The token is a new one, so that no statement with
    /// the old one can touch the record again.
    pub(crate) async fn release(self, conn: &mut PgConnection, claim: Claim) -> Result<(), Error> {
        let updated = self
            .query(
                "
                update idempotency.record
                set lease_until = '-infinity', token = $5::int8
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and claimed_at = pg_catalog.now()
                ",
            )
            .bind(claim.token)
            .bind(draw_token()?)
            .execute(conn)
            .await
            .map_err(Error::of_statement)?;
        if updated.rows_affected() == 1 { Ok(()) } else { Err(Error::NotInTransaction) }
    }
}
