//! The decisions of an operator or a reconciler about a record. Each statement changes a record only if the record has
//! not changed since it was shown: see [`Version`](crate::state::Version).

use std::time::Duration;

use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres};

use super::ends::storable;
use super::show::Shown;
use super::statement::{
    Record, changes_a_row, draw_token, interval, may_be_retried, no_live_lease, not_expired, readable, steps_hash,
};
use crate::error::MAX_STEPS_BYTES;
use crate::outcome::StoredResponse;
use crate::state::State;
use crate::{Error, InvalidStep, Misuse};

/// A decision about an operation, or about one of its steps.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Settlement<'a> {
    /// The operation took effect, with this response.
    Resolve { response: &'a StoredResponse, retention: Duration },
    /// The step took effect, with this result as JSON text.
    ResolveStep { step: &'a str, result: &'a str },
    /// The operation took no effect, and no step in doubt took effect.
    Release { reason: &'a str },
    /// The step took no effect.
    ReleaseStep { step: &'a str, reason: &'a str, grants: Grants },
    /// The operation may be attempted once more.
    Grant { reason: &'a str },
}

/// Whether the decision about a step permits one more attempt of the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grants {
    /// Permits one more attempt, because an operator who settles a step wants the operation to go on.
    OneAttempt,
    /// Permits no further attempt. Otherwise the operation could send requests for ever to a provider that never shows
    /// their effects.
    Nothing,
}

/// The condition that the record is unfinished and unchanged since it was shown, and that no owner works on the
/// operation. [`Shown::fenced`] binds the parameters.
///
/// The token alone does not show every change, because a heartbeat and a step of a suspended owner keep the token. The
/// update waits for the transaction of the heartbeat or the step, and checks this condition afterwards.
macro_rules! as_shown {
    () => {
        concat! {
            "where scope = $1::text and operation = $2::text and value = $3::text
                and token = $4::int8
                and ", readable!("lease_until"), " is not distinct from $5::timestamptz
                and ", steps_hash!(), " is not distinct from $6::int8
                and completed_at is null
                and ", no_live_lease!()
        }
    };
}

impl Shown {
    /// Carries out a decision about the record as it was shown, and returns the changed record. Returns `None` if the
    /// record has changed since it was shown, was or is under a live lease, or does not permit this decision.
    ///
    /// Each decision gives the record a new token, so an owner that was only suspended is fenced. If the transaction of
    /// a decision is rolled back, a record that was shown in that transaction cannot be used to settle anything.
    pub(crate) async fn settle(
        &self,
        conn: &mut PgConnection,
        decision: Settlement<'_>,
    ) -> Result<Option<Self>, Error> {
        // The owner may have sent its request after the record was shown. A lapse of the lease does not change the
        // version, so the statement would not notice.
        if self.state == State::InFlight {
            return Ok(None);
        }
        let update = match decision {
            Settlement::Resolve { response, retention } => self.resolving(response, retention)?,
            Settlement::ResolveStep { step, result } => self.resolving_step(step, result)?,
            Settlement::Release { reason } => self.releasing(reason)?,
            Settlement::ReleaseStep { step, reason, grants } => self.releasing_step(step, reason, grants)?,
            Settlement::Grant { reason } => self.granting(reason)?,
        };
        if !changes_a_row(&mut *conn, update).await? {
            return Ok(None);
        }
        let next = self.record().show(conn).await?;
        if let (Some(next), Settlement::ResolveStep { step, .. }) = (&next, decision) {
            let bytes: u64 = next.steps.iter().filter_map(|step| step.result_bytes).sum();
            // The size is checked after the update, which has locked the record. The error rolls the update back.
            if bytes > MAX_STEPS_BYTES as u64 {
                return Err(Misuse::Step { step: step.to_owned(), problem: InvalidStep::TooLarge }.into());
            }
        }
        Ok(next)
    }

    pub(crate) fn record(&self) -> Record<'_> {
        Record::unprepared(&self.key)
    }

    /// An SQL statement that takes effect only if the record is still as it was shown. The statement has a condition
    /// with the parameters $4 to $6, such as [`as_shown`].
    fn fenced(&self, sql: &'static str) -> Query<'_, Postgres, PgArguments> {
        self.record()
            .query(sql)
            .bind(self.version.token) // $4
            .bind(self.version.lease_until) // $5
            .bind(self.version.steps_hash) // $6
    }

    /// Stores the response for the retention. If the record's `expires_at` is already later than the end of this
    /// retention, `expires_at` stays unchanged.
    fn resolving<'a>(
        &'a self,
        response: &'a StoredResponse,
        retention: Duration,
    ) -> Result<Query<'a, Postgres, PgArguments>, Error> {
        let sql = concat! {
            "
            update /* pg_idempotency: resolve */ idempotency.record
            set completed_at = pg_catalog.statement_timestamp(), token = $7::int8, lease_until = null, steps = null,
                request = null, probes = null, granted_attempt = null,
                response_body = $8::bytea, response_status = $9::int2, response_headers = $10::text::jsonb,
                -- The key may have been pinned for longer by hand.
                expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $11::interval)
            ", as_shown!(), "
                -- A claim that never began has nothing that could be resolved.
                and attempt > 0
            ",
        };
        Ok(self
            .fenced(sql)
            .bind(draw_token()?) // $7
            .bind(&response.body) // $8
            .bind(response.status) // $9
            .bind(&response.headers) // $10
            .bind(interval(retention))) // $11
    }

    /// Releases the claim of an owner that is gone. The steps in doubt took no effect, so the next attempt performs
    /// them.
    fn releasing(&self, reason: &str) -> Result<Query<'_, Postgres, PgArguments>, Error> {
        let sql = concat! {
            "
            update /* pg_idempotency: release unperformed */ idempotency.record
            set lease_until = '-infinity', token = $7::int8, last_error = $8::text, probes = null,
                steps = nullif(steps - $9::text[], '{}'::jsonb),
                -- An operator who settles a step wants the operation to go on.
                granted_attempt = case when pg_catalog.cardinality($9::text[]) = 0 then granted_attempt else attempt + 1 end
            ", as_shown!(), "
            ",
        };
        Ok(self
            .fenced(sql)
            .bind(draw_token()?) // $7
            .bind(storable(reason)) // $8
            .bind(&self.in_doubt)) // $9
    }

    /// Stores the result of one step in doubt, releases the claim, and permits one more attempt. Other steps stay in
    /// doubt.
    fn resolving_step<'a>(&'a self, step: &'a str, result: &'a str) -> Result<Query<'a, Postgres, PgArguments>, Error> {
        let sql = concat! {
            "
            update /* pg_idempotency: settle step */ idempotency.record
            set lease_until = '-infinity', token = $7::int8, granted_attempt = attempt + 1, probes = null,
                -- Citus refuses a column in jsonb_build_object, which is stable. So the attempt is that of the old step.
                steps = pg_catalog.jsonb_set(steps, array[$8::text], (steps -> $8::text) - 'begun'::text
                    || pg_catalog.jsonb_build_object('result', $9::text, 'at', pg_catalog.statement_timestamp()))
            ", as_shown!(), "
                and steps -> $8::text -> 'begun'::text is not null
            ",
        };
        Ok(self
            .fenced(sql)
            .bind(draw_token()?) // $7
            .bind(step) // $8
            .bind(result)) // $9
    }

    /// Removes one step in doubt, which took no effect, and releases the claim. Other steps stay in doubt. The
    /// parameter `grants` decides whether one more attempt is permitted.
    fn releasing_step<'a>(
        &'a self,
        step: &'a str,
        reason: &str,
        grants: Grants,
    ) -> Result<Query<'a, Postgres, PgArguments>, Error> {
        let sql = concat! {
            "
            update /* pg_idempotency: release step */ idempotency.record
            set lease_until = '-infinity', token = $7::int8, last_error = $9::text, probes = null,
                granted_attempt = case when $10::bool then attempt + 1 else granted_attempt end,
                steps = nullif(steps - $8::text, '{}'::jsonb)
            ", as_shown!(), "
                and steps -> $8::text -> 'begun'::text is not null
            ",
        };
        Ok(self
            .fenced(sql)
            .bind(draw_token()?) // $7
            .bind(step) // $8
            .bind(storable(reason)) // $9
            .bind(grants == Grants::OneAttempt)) // $10
    }

    /// Permits one more attempt of an operation that was released or has lapsed, even if the service's limit is
    /// smaller.
    fn granting(&self, reason: &str) -> Result<Query<'_, Postgres, PgArguments>, Error> {
        let sql = concat! {
            "
            update /* pg_idempotency: grant attempt */ idempotency.record
            set granted_attempt = attempt + 1, lease_until = '-infinity', token = $7::int8, last_error = $8::text,
                probes = null
            ", as_shown!(), "
                -- In transaction mode attempts are not limited, and after attempt 0 comes the first.
                and mode in ('at_least_once', 'in_steps', 'at_most_once')
                and attempt > 0
                and ", not_expired!(), "
                and ", may_be_retried!(), "
            ",
        };
        Ok(self
            .fenced(sql)
            .bind(draw_token()?) // $7
            .bind(storable(reason))) // $8
    }

    /// Deletes the record if it has not changed since it was shown, and has no live lease. Returns whether the record
    /// was deleted.
    pub(crate) async fn delete(&self, conn: &mut PgConnection) -> Result<bool, Error> {
        let delete = self
            .fenced(concat! {
                "
                delete /* pg_idempotency: forget */ from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    and ", readable!("lease_until"), " is not distinct from $5::timestamptz
                    and ", steps_hash!(), " is not distinct from $6::int8
                    -- What is done is not to be forgotten for something unfinished.
                    and (completed_at is not null) = $7::bool
                    and ", no_live_lease!(), "
                ",
            })
            .bind(self.version.completed); // $7
        changes_a_row(conn, delete).await
    }
}
