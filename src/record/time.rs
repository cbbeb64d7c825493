//! The times of a record, moved by a test. `false` means that the key has no such record.

use std::time::Duration;

use sqlx::PgExecutor;

use super::statement::{Record, changes_a_row, interval};
use crate::Error;

impl Record<'_> {
    /// Moves all times of the record into the past.
    pub(crate) async fn move_back(self, executor: impl PgExecutor<'_>, by: Duration) -> Result<bool, Error> {
        let update = self.query(
            "
            update idempotency.record
            -- In UTC, because a time with a zone minus an interval depends on the session, and Citus refuses that.
            set claimed_at = (claimed_at at time zone 'UTC' - $4::interval) at time zone 'UTC',
                completed_at = (completed_at at time zone 'UTC' - $4::interval) at time zone 'UTC',
                lease_until = (lease_until at time zone 'UTC' - $4::interval) at time zone 'UTC',
                expires_at = (expires_at at time zone 'UTC' - $4::interval) at time zone 'UTC'
            where scope = $1::text and operation = $2::text and value = $3::text
            ",
        );
        changes_a_row(executor, update.bind(interval(by))).await
    }

    /// Ends the retention, and a live lease.
    pub(crate) async fn end(self, executor: impl PgExecutor<'_>) -> Result<bool, Error> {
        let update = self.query(
            "
            update idempotency.record
            set expires_at = least(expires_at, statement_timestamp() - interval '1 ms'),
                lease_until = least(
                    lease_until,
                    -- Null without a lease. Citus takes a CASE only without the clock.
                    statement_timestamp() - interval '1 ms' + case when lease_until is not null then interval '0' end
                )
            where scope = $1::text and operation = $2::text and value = $3::text
            ",
        );
        changes_a_row(executor, update).await
    }

    /// Ends the lease, live or lapsed.
    pub(crate) async fn end_lease(self, executor: impl PgExecutor<'_>) -> Result<bool, Error> {
        let update = self.query(
            "
            update idempotency.record
            set lease_until = least(lease_until, statement_timestamp() - interval '1 ms')
            where scope = $1::text and operation = $2::text and value = $3::text
                and completed_at is null
                and lease_until > '-infinity'
            ",
        );
        changes_a_row(executor, update).await
    }
}
