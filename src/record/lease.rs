//! What an owner, or an operator, does to a claim that outlives its transaction. Every statement demands the claim's token
//! and that nothing is stored yet: an owner that was overtaken meets no row.

use std::time::Duration;

use sqlx::PgConnection;

use super::{Record, Response, draw_token, interval};
use crate::Error;

/// The one that acts on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Actor {
    /// The owner, at any time.
    Owner,
    /// Somebody else, who must not reach past a live lease.
    Operator,
}

impl Record<'_> {
    /// Prolongs the lease; and the retention, where less than two leases are left of it, so that a claim whose owner dies is
    /// remembered for at least one lease after it has lapsed. `false` where the claim is gone.
    ///
    /// `expires_at` is indexed, and an update that leaves its value alone is still a heap-only one.
    pub(crate) async fn heartbeat(
        self,
        conn: &mut PgConnection,
        token: i64,
        lease: Duration,
        retention: Duration,
    ) -> Result<bool, Error> {
        self.changed(
            conn,
            self.query(
                "
                update idempotency.record
                set lease_until = pg_catalog.statement_timestamp() + $5::interval,
                    expires_at = case
                        when expires_at < pg_catalog.statement_timestamp() + $5::interval + $5::interval
                        then pg_catalog.statement_timestamp() + $6::interval
                        else expires_at
                    end
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and lease_until > '-infinity'
                ",
            )
            .bind(token)
            .bind(interval(lease))
            .bind(interval(retention)),
        )
        .await
    }

    /// Stores the result, and counts the retention from now. `false` where the claim is gone.
    ///
    /// A completed record is never changed. An owner that finds its own result stored under its token has had a commit whose
    /// answer was lost, so the statement counts that as stored. An operator has no claim to such a record: the same body may
    /// be half of somebody's HTTP response.
    pub(crate) async fn resolve(
        self,
        conn: &mut PgConnection,
        token: i64,
        response: &Response,
        retention: Duration,
        actor: Actor,
    ) -> Result<bool, Error> {
        self.changed(
            conn,
            self.query(
                "
                update idempotency.record
                set completed_at = coalesce(completed_at, pg_catalog.statement_timestamp()),
                    lease_until = null,
                    response_body = $5::bytea, response_status = $8::int2, response_headers = $9::text::jsonb,
                    expires_at = case when completed_at is null then pg_catalog.statement_timestamp() + $6::interval else expires_at end
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and (
                        completed_at is null
                        or $7::bool
                            and response_body is not distinct from $5::bytea
                            and response_status is not distinct from $8::int2
                            and response_headers is not distinct from $9::text::jsonb
                    )
                    and ($7::bool or lease_until is null or lease_until <= pg_catalog.statement_timestamp())
                ",
            )
            .bind(token)
            .bind(&response.body)
            .bind(interval(retention))
            .bind(actor == Actor::Owner)
            .bind(response.status)
            .bind(&response.headers),
        )
        .await
    }

    /// Gives the claim up unperformed, with the reason. The token is a new one, so that no heartbeat which is on its way
    /// revives it. `false` where the claim is gone.
    pub(crate) async fn give_up(
        self,
        conn: &mut PgConnection,
        token: i64,
        reason: &str,
        actor: Actor,
    ) -> Result<bool, Error> {
        self.changed(
            conn,
            self.query(
                "
                update idempotency.record
                set lease_until = '-infinity', token = $5::int8, last_error = $6::text
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and ($7::bool or lease_until is null or lease_until <= pg_catalog.statement_timestamp())
                ",
            )
            .bind(token)
            .bind(draw_token()?)
            .bind(storable(reason))
            .bind(actor == Actor::Owner),
        )
        .await
    }

    /// Ends the lease now, for an operation that may have taken effect, keeps the reason, and remembers it for the retention
    /// from now. The token is a new one, so that no heartbeat which is on its way revives it. `false` where the claim is gone.
    pub(crate) async fn lapse(
        self,
        conn: &mut PgConnection,
        token: i64,
        reason: &str,
        retention: Duration,
    ) -> Result<bool, Error> {
        self.changed(
            conn,
            self.query(
                "
                update idempotency.record
                set lease_until = pg_catalog.statement_timestamp(), token = $5::int8, last_error = $6::text,
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $7::interval)
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and lease_until > '-infinity'
                ",
            )
            .bind(token)
            .bind(draw_token()?)
            .bind(storable(reason))
            .bind(interval(retention)),
        )
        .await
    }

    async fn changed(
        self,
        conn: &mut PgConnection,
        statement: sqlx::query::Query<'_, sqlx::Postgres, sqlx::postgres::PgArguments>,
    ) -> Result<bool, Error> {
        Ok(statement.execute(conn).await.map_err(Error::of_statement)?.rows_affected() == 1)
    }
}

/// The reason as a `text` column takes it: no NUL, and no more than an operator reads.
fn storable(reason: &str) -> String {
    reason.chars().filter(|character| *character != '\0').take(2000).collect()
}
