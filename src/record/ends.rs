//! The statements that end a claim, with or without a response, and the heartbeat that prolongs a lease.
//!
//! Each update requires the claim's token and a record without a response. So after a take-over, an update of the old
//! owner finds no row. In transaction mode, each update also requires the transaction that made the claim.

use std::time::Duration;

use sqlx::PgConnection;

use super::statement::{Record, changes_a_row, draw_token, interval, not_expired};
use super::tried::Claim;
use crate::outcome::StoredResponse;
use crate::{Error, Misuse};

impl Record<'_> {
    /// Stores the response. The statement requires the claim's token, and the transaction of the claim
    /// (`claimed_at = now()`). So after a COMMIT or ROLLBACK inside `perform`, the function returns
    /// [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction), and nothing is acknowledged. The update also
    /// fails in an aborted transaction. The COMMIT of such a transaction would succeed without saving anything.
    ///
    /// If the retention is over, the function returns [`Error::OutlivedRetention`]. The response would be expired at
    /// once, so the next call would perform the operation again.
    pub(crate) async fn complete(
        self,
        conn: &mut PgConnection,
        claim: Claim,
        response: &StoredResponse,
    ) -> Result<(), Error> {
        let update = self
            .query(concat! {
                "
                update /* pg_idempotency: complete */ idempotency.record
                set completed_at = pg_catalog.statement_timestamp(),
                    response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
                    and ", not_expired!(), "
                ",
            })
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

    /// Whether this transaction still owns the claim. After a completion that has changed no row, this decides between
    /// its two errors.
    async fn is_claimed(self, conn: &mut PgConnection, claim: Claim) -> Result<bool, Error> {
        let claimed = self
            .query(
                "
                select /* pg_idempotency: ask */
                from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
                ",
            )
            .bind(claim.token) // $4
            .fetch_optional(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok(claimed.is_some())
    }
}

impl Record<'_> {
    /// Releases a claim in the transaction that made the claim. After the COMMIT, the next caller may claim. The record
    /// gets a new token, so no statement with the old token can change the record again.
    pub(crate) async fn release_in_transaction(self, conn: &mut PgConnection, claim: Claim) -> Result<(), Error> {
        let released = self
            .query(
                "
                with /* pg_idempotency: release in transaction */ released as (
                    update idempotency.record
                    set lease_until = '-infinity', token = $5::int8
                    where scope = $1::text and operation = $2::text and value = $3::text
                        and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
                    returning token
                )
                -- Citus takes no volatile function in the RETURNING of an update.
                select pg_catalog.set_config('idempotency.claim', pg_catalog.array_to_string(pg_catalog.array_remove(
                    pg_catalog.string_to_array(pg_catalog.current_setting('idempotency.claim', true), ' '),
                    $4::int8::text
                ), ' '), true)
                from released
                ",
            )
            .bind(claim.token) // $4
            .bind(draw_token()?) // $5
            .fetch_optional(conn)
            .await
            .map_err(Error::of_statement)?;
        if released.is_some() { Ok(()) } else { Err(Error::Misuse(Misuse::NotInTransaction)) }
    }
}

impl Record<'_> {
    /// Prolongs the lease. If the retention would end earlier than two lengths of the lease from now, prolongs the
    /// retention to this time. So if the owner dies, the lapsed claim is remembered for at least one more length of the
    /// lease. Returns `false` if the claim is gone.
    ///
    /// `expires_at` is indexed, but an update that keeps the value of `expires_at` is still a heap-only update.
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

    /// Stores the response. The retention counts from now. Returns `false` if the claim is gone.
    ///
    /// A completed record never changes. If an owner finds its own response stored under its token, its COMMIT
    /// succeeded and the server's answer was lost. In this case the function returns `true`.
    pub(crate) async fn complete_lease(
        self,
        conn: &mut PgConnection,
        token: i64,
        response: &StoredResponse,
        retention: Duration,
    ) -> Result<bool, Error> {
        let update = self
            .query(
                "
                update /* pg_idempotency: complete lease */ idempotency.record
                set completed_at = pg_catalog.statement_timestamp(), lease_until = null, steps = null, request = null,
                    probes = null, granted_attempt = null,
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
    async fn has_stored(self, conn: &mut PgConnection, token: i64, response: &StoredResponse) -> Result<bool, Error> {
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
    /// Releases the claim of a lease on behalf of its owner, and stores the reason. All steps stay, including those in
    /// doubt. The record gets a new token, so a delayed heartbeat cannot revive the claim. If `keeps_request` is
    /// `false`, the stored request is deleted, because only the caller may continue the work then. Returns `false` if
    /// the claim is gone.
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

    /// Frees the key of a first attempt that was refused and did nothing, and stores the reason. The next call may have
    /// any body, and is the first attempt. Returns `false` if the claim is gone.
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
    /// record for at least the retention from now. The record gets a new token, so a delayed heartbeat cannot revive
    /// the claim. If `keeps_request` is `false`, the stored request is deleted. Returns `false` if the claim is gone.
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

/// The result of the release of a claim whose work has not begun.
pub(crate) enum ReleaseOfUnbegun {
    /// The claim is released, was never committed, or belongs to another call.
    Decided { released: bool },
    /// An open transaction holds the key, so the COMMIT may still be on its way.
    Held,
}

impl Record<'_> {
    /// Releases a claim whose work has not begun. The claim does not count as an attempt, and the record keeps the data
    /// of earlier attempts. After a first claim, the record has attempt 0, and a call with any body may claim the key.
    ///
    /// The claiming transaction holds the key's lock until its COMMIT is decided. So this function first tries the
    /// lock. There are two reasons why the update may then find no row: either no claim with this token was committed,
    /// or another call has taken the claim over. The update is a separate statement, because its snapshot must be newer
    /// than the lock. The transaction must be at READ COMMITTED
    /// ([`Opening::READ_COMMITTED`](crate::record::Opening)), where each statement has a new snapshot.
    pub(crate) async fn release_unbegun(self, conn: &mut PgConnection, token: i64) -> Result<ReleaseOfUnbegun, Error> {
        let lock =
            sqlx::query_scalar("select /* pg_idempotency: try lock */ pg_catalog.pg_try_advisory_xact_lock($1::int8)")
                .persistent(self.persistent)
                .bind(self.key.lock_id()); // $1
        if !lock.fetch_one(&mut *conn).await.map_err(Error::of_statement)? {
            return Ok(ReleaseOfUnbegun::Held);
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
        Ok(ReleaseOfUnbegun::Decided { released: changes_a_row(conn, update).await? })
    }
}

/// Returns the reason without NUL characters, because a `text` column refuses them. Cuts the reason to 2000 characters,
/// because an operator reads no more.
pub(crate) fn storable(reason: &str) -> String {
    reason.chars().filter(|character| *character != '\0').take(2000).collect()
}
