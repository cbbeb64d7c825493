//! The end of a claim without a response.

use std::time::Duration;

use sqlx::PgConnection;

use super::claim::Claim;
use super::distributed;
use super::fragment::{forget_claim, no_live_lease};
use super::lease::Actor;
use super::statement::{Record, changes_a_row, draw_token, interval};
use super::step::Steps;
use crate::Error;

impl Record<'_> {
    /// Releases a claim in the transaction that claimed: the next caller may claim at once. The new token makes sure
    /// that no statement with the old token changes the record again.
    pub(crate) async fn release(self, conn: &mut PgConnection, claim: Claim) -> Result<(), Error> {
        macro_rules! release {
            () => {
                "
                update idempotency.record
                set lease_until = '-infinity', token = $5::int8
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
                "
            };
        }
        let distributed = self.deployment.distributed;
        let sql = if distributed { release!() } else { concat!(release!(), "returning ", forget_claim!("$4::int8")) };
        let update = self.query(sql).bind(claim.token).bind(draw_token()?);
        if !changes_a_row(&mut *conn, update).await? {
            return Err(Error::NotInTransaction);
        }
        if distributed {
            distributed::forget_claim(conn, self.deployment, claim.token).await?;
        }
        Ok(())
    }

    /// Releases the claim of a lease, and stores the reason. Steps with a result stay. A step in doubt stays if the
    /// owner releases, and is forgotten if an operator does. Because of the new token, a heartbeat that is on its way
    /// cannot revive the claim. `false` means that the claim is gone.
    pub(crate) async fn release_lease(
        self,
        conn: &mut PgConnection,
        token: i64,
        reason: &str,
        actor: Actor,
    ) -> Result<bool, Error> {
        let forgotten = match actor {
            Actor::Owner => Vec::new(),
            // They say that these steps took no effect. Locked, because an owner that was suspended could store the
            // result of one in this moment, and the update would delete it.
            Actor::Operator => self.lock_steps(conn, token).await?.map(Steps::in_doubt).unwrap_or_default(),
        };
        let update = self
            .query(concat! {
                "
                update idempotency.record
                set lease_until = '-infinity', token = $5::int8, last_error = $6::text,
                    steps = nullif(steps - $8::text[], '{}')
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and ($7::bool or ", no_live_lease!(), ")
                ",
            })
            .bind(token)
            .bind(draw_token()?)
            .bind(storable(reason))
            .bind(actor == Actor::Owner)
            .bind(forgotten);
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
    ) -> Result<bool, Error> {
        let update = self
            .query(
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
            .bind(interval(retention));
        changes_a_row(conn, update).await
    }
}

/// The reason without NUL characters, which a `text` column refuses, and cut to 2000 characters, which is more than an
/// operator reads.
fn storable(reason: &str) -> String {
    reason.chars().filter(|character| *character != '\0').take(2000).collect()
}
