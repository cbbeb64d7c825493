//! How a claim ends, with a response or without one. Until then, the owner of a lease prolongs it.
//!
//! Each statement requires the claim's token, and a record without a response. So the statement of an owner whose claim
//! was taken over finds no row. A claim in transaction mode ends in its own transaction, and its statements require
//! this, too.

use std::time::Duration;

use sqlx::PgConnection;

use super::statement::{Record, changes_a_row, draw_token, interval};
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

/// Releases a claim in its own transaction. It is one text for both kinds of table. The parameters are $4, its token,
/// and $5, the new one.
macro_rules! release_in_transaction {
    () => {
        "
        update /* pg_idempotency: release in transaction */ idempotency.record
        set lease_until = '-infinity', token = $5::int8
        where scope = $1::text and operation = $2::text and value = $3::text
            and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
        "
    };
}
pub(super) use release_in_transaction;

impl Record<'_> {
    /// The usual [`release_in_transaction`](Record::release_in_transaction).
    pub(super) async fn release_and_forget(self, conn: &mut PgConnection, claim: Claim) -> Result<(), Error> {
        let update = self
            .query(concat! {
                release_in_transaction!(), "
                returning pg_catalog.set_config('idempotency.claim', pg_catalog.array_to_string(pg_catalog.array_remove(
                    pg_catalog.string_to_array(pg_catalog.current_setting('idempotency.claim', true), ' '),
                    $4::int8::text
                ), ' '), true)
                ",
            })
            .bind(claim.token) // $4
            .bind(draw_token()?); // $5
        if changes_a_row(conn, update).await? { Ok(()) } else { Err(Error::Misuse(Misuse::NotInTransaction)) }
    }
}

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
                    probes = null, misdirected = null, granted_attempt = null,
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

impl Record<'_> {
    /// Releases the claim of a lease, as its owner, and stores the reason. All steps stay, also those in doubt. Because
    /// of the new token, a heartbeat that is on its way cannot revive the claim. `false` means that the claim is gone.
    /// The stored request is deleted if the work may no longer be done without its caller.
    pub(crate) async fn release_lease(
        self,
        conn: &mut PgConnection,
        token: i64,
        reason: &str,
        keeps_request: bool,
    ) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: release */ idempotency.record
                set lease_until = '-infinity', token = $5::int8, last_error = $6::text,
                    request = case when $7::bool then request end, probes = null
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                ",
            )
            .bind(token) // $4
            .bind(draw_token()?) // $5
            .bind(storable(reason)) // $6
            .bind(keeps_request); // $7
        changes_a_row(conn, update).await
    }

    /// Frees the key of a first attempt that was refused and did nothing, as its owner, and stores the reason. The next
    /// call may have any body, and is the first attempt. `false` means that the claim is gone.
    #[cfg(feature = "http")]
    pub(crate) async fn free(self, conn: &mut PgConnection, token: i64, reason: &str) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: free */ idempotency.record
                set lease_until = '-infinity', token = $5::int8, last_error = $6::text,
                    attempt = 0, granted_attempt = null, steps = null, request = null, probes = null
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and attempt = 1
                ",
            )
            .bind(token) // $4
            .bind(draw_token()?) // $5
            .bind(storable(reason)); // $6
        changes_a_row(conn, update).await
    }

    /// Ends the lease now, because the operation failed and may have taken effect. Stores the reason, and remembers the
    /// record for at least the retention from now. Because of the new token, a heartbeat that is on its way cannot
    /// revive the claim. `false` means that the claim is gone.
    pub(crate) async fn lapse(
        self,
        conn: &mut PgConnection,
        token: i64,
        reason: &str,
        retention: Duration,
        keeps_request: bool,
    ) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: lapse */ idempotency.record
                set lease_until = pg_catalog.statement_timestamp(), token = $5::int8, last_error = $6::text,
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $7::interval),
                    request = case when $8::bool then request end, probes = null
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and lease_until > '-infinity'
                ",
            )
            .bind(token) // $4
            .bind(draw_token()?) // $5
            .bind(storable(reason)) // $6
            .bind(interval(retention)) // $7
            .bind(keeps_request); // $8
        changes_a_row(conn, update).await
    }
}

/// What is known of a claim whose COMMIT got no answer.
pub(crate) enum Unclaimed {
    /// It is released, or it never was, or another call has it.
    Decided { released: bool },
    /// An open transaction holds the key: the COMMIT may still be on its way.
    Held,
}

impl Record<'_> {
    /// Releases a claim whose work has not begun. The claim does not count as an attempt, and the record keeps the data
    /// of earlier attempts. A first claim leaves attempt 0, after which any body may claim.
    ///
    /// The claiming transaction holds the key's lock until its COMMIT is decided. So this function tries the lock
    /// first. If it then finds no row, the claim was never committed. The update is a statement of its own, because its
    /// snapshot must be younger than the lock. The transaction must be at READ COMMITTED
    /// ([`Opening::ReadCommitted`](crate::session::Opening)), where each statement has a new snapshot.
    pub(crate) async fn release_unbegun(self, conn: &mut PgConnection, token: i64) -> Result<Unclaimed, Error> {
        let lock =
            sqlx::query_scalar("select /* pg_idempotency: try lock */ pg_catalog.pg_try_advisory_xact_lock($1::int8)")
                .persistent(self.deployment.prepared)
                .bind(self.key.lock_id()); // $1
        if !lock.fetch_one(&mut *conn).await.map_err(Error::of_statement)? {
            return Ok(Unclaimed::Held);
        }
        let update = self
            .query(
                "
                update /* pg_idempotency: release unbegun */ idempotency.record
                set lease_until = '-infinity', token = $5::int8, attempt = attempt - 1,
                    steps = case when attempt > 1 then steps end, request = case when attempt > 1 then request end,
                    probes = null
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and lease_until > '-infinity'::timestamptz
                ",
            )
            .bind(token) // $4
            .bind(draw_token()?); // $5
        Ok(Unclaimed::Decided { released: changes_a_row(conn, update).await? })
    }
}

/// The reason without NUL characters, which a `text` column refuses, and cut to 2000 characters, which is more than an
/// operator reads.
pub(crate) fn storable(reason: &str) -> String {
    reason.chars().filter(|character| *character != '\0').take(2000).collect()
}
