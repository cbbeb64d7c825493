//! Looking at what is in the way of a claim.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::{Record, Response, Terms};
use crate::mode::UnknownMode;
use crate::{Error, Mode};

/// What a look has seen.
pub(crate) struct Look {
    /// When the caller first asked, by the database's clock.
    pub(crate) asked: DateTime<Utc>,
    pub(crate) standing: Standing,
}

/// What a claim has met.
pub(crate) enum Standing {
    Found(Found),
    /// Nothing is there any more, and this transaction has the lock: claim again.
    Free,
    /// An open transaction holds the key; its record is not committed.
    Held,
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
    /// Past its retention when the caller first asked, and under no live lease.
    pub(crate) expired: bool,
    pub(crate) response: Response,
    pub(crate) last_error: Option<String>,
}

/// The state of a record's `lease_until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    None,
    Live(Duration),
    Lapsed,
    Released,
}

impl Record<'_> {
    /// Looks at what was in the way of a claim, in a snapshot of its own: an owner may have committed since the claim's.
    /// `asked` is the time of this call's first look.
    ///
    /// A look that finds a record takes no lock: the lock would last as long as the caller's transaction.
    pub(crate) async fn look(self, conn: &mut PgConnection, asked: Option<DateTime<Utc>>) -> Result<Look, Error> {
        self.query(
            "
            select
                asked.at as asked,
                case when record.token is null then pg_catalog.pg_try_advisory_xact_lock($4::int8) end as mine,
                record.mode,
                record.fingerprint,
                record.token,
                record.attempt,
                record.claimed_at,
                record.claimed_at = pg_catalog.now() as claimed_by_this_transaction,
                case when record.lease_until > pg_catalog.statement_timestamp()
                    then extract(epoch from record.lease_until - pg_catalog.statement_timestamp())::float8
                end as lease_left,
                record.lease_until = '-infinity' as released,
                record.completed_at is not null as completed,
                record.expires_at <= asked.at
                    and (record.lease_until is null or record.lease_until <= pg_catalog.statement_timestamp()) as expired,
                record.response_status,
                record.response_headers::text as response_headers,
                record.response_body,
                record.last_error
            -- The smaller, because the clock may have jumped back: a record must not expire before its time.
            from (select least($5::timestamptz, pg_catalog.statement_timestamp()) as at) as asked
            left join idempotency.record
                on record.scope = $1::text and record.operation = $2::text and record.key = $3::text
            ",
        )
        .bind(self.key.lock_id())
        .bind(asked)
        .fetch_one(conn)
        .await
        .and_then(|row| Ok(Look { asked: row.try_get("asked")?, standing: standing(&row)? }))
        .map_err(Error::of_statement)
    }

    /// Looks for a response to replay, before anything is begun.
    ///
    /// `None` also in somebody's open transaction that has written something: what is seen there may not be committed.
    pub(crate) async fn stored_response(
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
                    and expires_at > pg_catalog.statement_timestamp()
                    and pg_catalog.pg_current_xact_id_if_assigned() is null
                ",
            )
            .bind(terms.mode.as_str())
            .fetch_optional(conn)
            .await?;
        row.map(|row| Ok((row.try_get("fingerprint")?, response(&row)?))).transpose()
    }
}

fn standing(row: &PgRow) -> sqlx::Result<Standing> {
    match row.try_get("mine")? {
        None => Ok(Standing::Found(found(row)?)),
        Some(true) => Ok(Standing::Free),
        Some(false) => Ok(Standing::Held),
    }
}

fn found(row: &PgRow) -> sqlx::Result<Found> {
    let lease_left: Option<f64> = row.try_get("lease_left")?;
    let lease = match (lease_left, row.try_get("released")?) {
        (Some(left), _) => Lease::Live(Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX)),
        (None, Some(true)) => Lease::Released,
        (None, Some(false)) => Lease::Lapsed,
        (None, None) => Lease::None,
    };
    Ok(Found {
        mode: Mode::from_column(row.try_get("mode")?),
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
    })
}

fn response(row: &PgRow) -> sqlx::Result<Response> {
    Ok(Response {
        status: row.try_get("response_status")?,
        headers: row.try_get("response_headers")?,
        body: row.try_get("response_body")?,
    })
}
