//! Completion in transaction mode. `lease.rs` contains the completion of a lease.

use sqlx::PgConnection;

use super::statement::{Record, changes_a_row};
use super::tried::Claim;
use crate::outcome::Response;
use crate::{Error, Misuse};

impl Record<'_> {
    /// Stores the response. The statement requires the claim's token and the claim's own transaction
    /// (`claimed_at = now()`). So after a COMMIT or ROLLBACK inside `perform` it returns
    /// [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction), and nothing is acknowledged. As a write it also
    /// fails in an aborted transaction, whose COMMIT would succeed without saving anything.
    pub(crate) async fn complete(
        self,
        conn: &mut PgConnection,
        claim: Claim,
        response: &Response,
    ) -> Result<(), Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: complete */ idempotency.record
                set completed_at = pg_catalog.statement_timestamp(),
                    response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
                    and expires_at > pg_catalog.statement_timestamp()
                ",
            )
            .bind(claim.token) // $4
            .bind(&response.body) // $5
            .bind(response.status) // $6
            .bind(&response.headers); // $7
        if changes_a_row(&mut *conn, update).await? {
            return Ok(());
        }
        if self.is_claimed(conn, claim).await? {
            return Err(Error::OutlivedRetention);
        }
        Err(Error::Misuse(Misuse::NotInTransaction))
    }

    /// Whether this transaction still owns the claim. The crate asks this only after a completion that failed. It is an
    /// update, because in a SELECT a worker of Citus evaluates its own `now()`.
    async fn is_claimed(self, conn: &mut PgConnection, claim: Claim) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: ask */ idempotency.record
                set token = token
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
                ",
            )
            .bind(claim.token); // $4
        changes_a_row(conn, update).await
    }
}
