//! Every SQL statement on `idempotency.record`, one function each; the claim, the lease, the sweep and others have files
//! of their own.
//!
//! All of them are literals, but for what [`combined`] sends; they name the schema, cast each parameter (sqlx keeps prepared
//! statements by their text alone) and have the whole key in them. Time is the database's: `statement_timestamp()` for what
//! expires, because `now()` stands still from BEGIN on.

mod claim;
mod combined;
mod inspect;
mod lease;
mod lock;
mod mark;
mod setup;
mod sweep;

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::types::PgInterval;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row};

use crate::mode::UnknownMode;
use crate::{Error, Key, Mode};

pub(crate) use claim::{Claim, Terms, wait_error};
pub(crate) use combined::is_taken;
pub(crate) use inspect::{groups, size, unsettled};
pub(crate) use lease::Actor;
pub(crate) use lock::{INSTALLER, SINGLE_RUNNER, holder, try_lock};
pub(crate) use mark::{MarkBatch, Standing};
pub(crate) use setup::{commit_settings, setup, without_autovacuum};
pub(crate) use sweep::{Batch, Due, count_due, leaves, oldest_due, sweep, sweep_distributed};

/// The record of one key.
#[derive(Clone, Copy)]
pub(crate) struct Record<'k> {
    pub(crate) key: &'k Key,
    /// Whether statements are kept prepared, which a pooler in transaction mode may not allow.
    pub(crate) prepared: bool,
}

/// A record that was in the way of a claim.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) mode: Result<Mode, UnknownMode>,
    pub(crate) fingerprint: Option<Vec<u8>>,
    pub(crate) token: i64,
    pub(crate) attempt: i32,
    pub(crate) claimed_at: DateTime<Utc>,
    pub(crate) claimed_by_this_transaction: bool,
    pub(crate) lease: Lease,
    pub(crate) completed: bool,
    /// Past its retention, and under no live lease.
    pub(crate) expired: bool,
    pub(crate) response: Response,
    pub(crate) last_error: Option<String>,
}

/// A response as its record holds it: a body of JSON text alone, or, over HTTP, a status, headers and a body.
///
/// A status without a body is what is left of an HTTP response that was not to be kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: Option<i16>,
    /// JSON text.
    pub(crate) headers: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
}

/// The state of a record's `lease_until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    None,
    Live(Duration),
    Lapsed,
    Released,
}

/// Why a completion met no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmet {
    /// The claim is still this transaction's, and past its retention.
    OutlivedRetention,
    /// The claim's transaction is gone.
    NotInTransaction,
}

impl Record<'_> {
    /// Looks at what was in the way of a claim, in a snapshot of its own: the claim's is from before its wait. Puts back
    /// the caller's `lock_timeout`, also when there is nothing to see, hence the join.
    pub(crate) async fn look(self, conn: &mut PgConnection) -> Result<Option<Found>, Error> {
        self.query(
            "
            select
                caller.lock_timeout,
                record.mode,
                record.fingerprint,
                record.token,
                record.attempt,
                record.claimed_at,
                record.claimed_at = now() as claimed_by_this_transaction,
                case when record.lease_until > statement_timestamp()
                    then extract(epoch from record.lease_until - statement_timestamp())::float8
                end as lease_left,
                record.lease_until = '-infinity' as released,
                record.completed_at is not null as completed,
                record.expires_at <= statement_timestamp()
                    and (record.lease_until is null or record.lease_until <= statement_timestamp()) as expired,
                record.response_status,
                record.response_headers::text as response_headers,
                record.response_body,
                record.last_error
            from (
                select set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true) as lock_timeout
            ) as caller
            left join idempotency.record
                on record.scope = $1::text and record.operation = $2::text and record.key = $3::text
            ",
        )
        .fetch_one(conn)
        .await
        .and_then(|row| found(&row))
        .map_err(Error::of_statement)
    }

    /// Looks, outside a transaction, for a response to give back. What it does not find, another look has to explain.
    ///
    /// `None` also in somebody's open transaction that has written something: what it sees there need not be committed.
    pub(crate) async fn look_first(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
    ) -> sqlx::Result<Option<(Vec<u8>, Response)>> {
        let row = self
            .query(
                "
                select fingerprint, response_status, response_headers::text as response_headers, response_body
                from idempotency.record
                where scope = $1::text and operation = $2::text and key = $3::text
                    and mode = $4::text
                    and completed_at is not null
                    and expires_at > statement_timestamp()
                    and pg_current_xact_id_if_assigned() is null
                ",
            )
            .bind(terms.mode.as_str())
            .fetch_optional(conn)
            .await?;
        row.map(|row| Ok((row.try_get("fingerprint")?, response(&row)?))).transpose()
    }

    /// Stores the response. Demands the claim's token and the claim's own transaction (`claimed_at = now()`), so that what
    /// a COMMIT or ROLLBACK inside `perform` has torn apart is never acknowledged; and, being a write, it fails in an
    /// aborted transaction, whose COMMIT would succeed without saving anything.
    pub(crate) async fn complete(
        self,
        conn: &mut PgConnection,
        claim: Claim,
        response: &Response,
    ) -> Result<Result<(), Unmet>, Error> {
        let updated = self
            .query(
                "
                update idempotency.record
                set completed_at = statement_timestamp(),
                    response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and claimed_at = now()
                    and expires_at > statement_timestamp()
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
            return Ok(Ok(()));
        }
        self.why_unmet(conn, claim).await.map(Err)
    }

    /// Tells why a completion met no row. Off the ordinary path.
    async fn why_unmet(self, conn: &mut PgConnection, claim: Claim) -> Result<Unmet, Error> {
        let ours = self
            .query(
                "
                select
                from idempotency.record
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and claimed_at = now()
                ",
            )
            .bind(claim.token)
            .fetch_optional(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok(if ours.is_some() { Unmet::OutlivedRetention } else { Unmet::NotInTransaction })
    }

    /// Gives the claim up unperformed: the next caller may claim at once. The token is a new one, so that nothing which
    /// knows the old one can touch the record again.
    pub(crate) async fn release(self, conn: &mut PgConnection, claim: Claim) -> Result<(), Error> {
        let updated = self
            .query(
                "
                update idempotency.record
                set lease_until = '-infinity', token = $5::int8
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and completed_at is null
                    and claimed_at = now()
                ",
            )
            .bind(claim.token)
            .bind(claim::draw_token()?)
            .execute(conn)
            .await
            .map_err(Error::of_statement)?;
        if updated.rows_affected() == 1 { Ok(()) } else { Err(Error::NotInTransaction) }
    }

    /// A statement on this record, whose parameters $1 to $3 are the key.
    fn query(&self, sql: &'static str) -> Query<'_, Postgres, PgArguments> {
        sqlx::query(sql)
            .persistent(self.prepared)
            .bind(self.key.scope())
            .bind(self.key.operation())
            .bind(self.key.value())
    }
}

fn found(row: &PgRow) -> sqlx::Result<Option<Found>> {
    let Some(mode) = row.try_get::<Option<&str>, _>("mode")? else {
        return Ok(None);
    };
    let lease_left: Option<f64> = row.try_get("lease_left")?;
    let lease = match (lease_left, row.try_get("released")?) {
        (Some(left), _) => Lease::Live(Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX)),
        (None, Some(true)) => Lease::Released,
        (None, Some(false)) => Lease::Lapsed,
        (None, None) => Lease::None,
    };
    Ok(Some(Found {
        mode: Mode::from_column(mode),
        fingerprint: row.try_get("fingerprint")?,
        token: row.try_get("token")?,
        attempt: row.try_get("attempt")?,
        claimed_at: row.try_get("claimed_at")?,
        claimed_by_this_transaction: row.try_get("claimed_by_this_transaction")?,
        lease,
        completed: row.try_get("completed")?,
        expired: row.try_get("expired")?,
        response: response(row)?,
        last_error: row.try_get("last_error")?,
    }))
}

fn response(row: &PgRow) -> sqlx::Result<Response> {
    Ok(Response {
        status: row.try_get("response_status")?,
        headers: row.try_get("response_headers")?,
        body: row.try_get("response_body")?,
    })
}

/// Microseconds only: days and months would depend on the session's time zone.
fn interval(duration: Duration) -> PgInterval {
    PgInterval { months: 0, days: 0, microseconds: i64::try_from(duration.as_micros()).unwrap_or(i64::MAX) }
}
