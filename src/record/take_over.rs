//! Winning the right to perform by taking over a record that is expired, released or lapsed.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row as _};

use super::claim::{Claim, Terms};
use super::fragment::expired_when_asked;
use super::statement::{Record, draw_token, interval};
use crate::{Error, Fingerprint};

/// How a [take-over](Record::take_over) ended.
pub(crate) enum TakeOver {
    Won(Claim),
    /// An open transaction holds the key.
    Held,
    /// Another call has changed the record since the look: look again.
    Overtaken,
    /// The row is gone, or a transaction that does not hold the key has locked it: a sweep, an operator, a large batch
    /// of marks.
    Locked,
}

impl Record<'_> {
    /// Takes over a claim that had expired at `asked`, or is released or lapsed, in one conditional update. One of all
    /// callers that saw `found_token` wins, and the others look again.
    pub(crate) async fn take_over(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: DateTime<Utc>,
        found_token: i64,
        attempt: i32,
    ) -> Result<TakeOver, Error> {
        let token = draw_token()?;
        let (mine, free, taken): (bool, bool, bool) = self
            .query(concat! {
                "
                with mine as materialized (select pg_catalog.pg_try_advisory_xact_lock($7::int8) as mine),
                -- A row that a sweep is deleting is skipped: no call waits for a row.
                free as materialized (
                    select record.token
                    from mine, idempotency.record
                    where mine.mine
                        and record.scope = $1::text and record.operation = $2::text and record.key = $3::text
                    for update of record skip locked
                ),
                taken as (
                    update idempotency.record
                    set mode = $9::text, fingerprint = $4::bytea, token = $5::int8,
                        attempt = $12::int4, claimed_at = pg_catalog.now(),
                        completed_at = case when $9::text = 'mark' then pg_catalog.statement_timestamp() end,
                        lease_until = pg_catalog.statement_timestamp() + $8::interval,
                        expires_at = pg_catalog.statement_timestamp() + $6::interval,
                        response_status = null, response_headers = null, response_body = null,
                        last_error = case when $12::int4 > 1 then last_error end
                    from free
                    where scope = $1::text and operation = $2::text and key = $3::text
                        and record.token = $10::int8
                        -- As in idempotency.await_key.
                        and (
                            ", expired_when_asked!("$11"), "
                            or (completed_at is null and lease_until = '-infinity')
                            or (completed_at is null and lease_until <= pg_catalog.statement_timestamp()
                                and mode = 'at_least_once')
                        )
                    returning true
                )
                select mine.mine, exists (select from free) as free, exists (select from taken) as taken
                from mine
                ",
            })
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes))
            .bind(token)
            .bind(interval(terms.retention))
            .bind(self.key.lock_id())
            .bind(terms.lease.map(interval))
            .bind(terms.mode.as_str())
            .bind(found_token)
            .bind(asked)
            .bind(attempt)
            .try_map(|row| Ok((row.try_get("mine")?, row.try_get("free")?, row.try_get("taken")?)))
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok(match (mine, free, taken) {
            (false, ..) => TakeOver::Held,
            (true, _, true) => TakeOver::Won(Claim { token, attempt }),
            (true, true, false) => TakeOver::Overtaken,
            (true, false, false) => TakeOver::Locked,
        })
    }
}
