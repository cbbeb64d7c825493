//! Winning the right to perform by taking over a record that is expired, released or lapsed.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::claim::{Claim, Terms, Tried, note_claim};
use super::statement::{Record, interval};
use crate::Error;

/// Takes over the row of the CTE `free`. It is one text for both kinds of table: a column that one of two texts forgot
/// to clear could give a caller the response of the old record.
///
/// A distributed table takes no clock inside CASE, so the time of completion is a sum: null unless a mark has an
/// interval to add.
macro_rules! take_over_free {
    () => {
        concat! {
            "update idempotency.record
            set mode = $8::text, fingerprint = $5::bytea, token = $4::int8,
                attempt = $11::int4, granted_attempt = case when $11::int4 > 1 then granted_attempt end, claimed_at = pg_catalog.now(),
                completed_at = pg_catalog.statement_timestamp() + case when $8::text = 'mark' then interval '0' end,
                lease_until = pg_catalog.statement_timestamp() + $7::interval,
                expires_at = pg_catalog.statement_timestamp() + $6::interval,
                response_status = null, response_headers = null, response_body = null,
                last_error = case when $11::int4 > 1 then last_error end,
                steps = case when $11::int4 > 1 then steps end, request = case when $11::int4 > 1 then request end,
                looks = null, misdirected = case when $11::int4 > 1 then misdirected end, trace = $12::text
            from free
            where scope = $1::text and operation = $2::text and value = $3::text
                and record.token = $9::int8
                and ", $crate::record::fragment::may_be_taken_over!("$10")
        }
    };
}
pub(super) use take_over_free;

impl Record<'_> {
    /// A statement with [`take_over_free`], whose parameters are $4 to $12.
    pub(super) fn taking(
        &self,
        sql: &'static str,
        terms: &Terms,
        asked: DateTime<Utc>,
        found_token: i64,
        claim: Claim,
    ) -> Query<'_, Postgres, PgArguments> {
        self.query(sql)
            .bind(claim.token) // $4
            .bind(terms.fingerprint.as_ref().map(|fingerprint| fingerprint.as_bytes().to_vec())) // $5
            .bind(interval(terms.retention)) // $6
            .bind(terms.lease.map(interval)) // $7
            .bind(terms.mode.as_str()) // $8
            .bind(found_token) // $9
            .bind(asked) // $10
            .bind(claim.attempt) // $11
            .bind(terms.trace.as_str().map(str::to_owned)) // $12
    }

    /// The usual [`take_over`](Record::take_over), in one conditional update.
    pub(super) async fn lock_and_take(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: DateTime<Utc>,
        found_token: i64,
        claim: Claim,
    ) -> Result<Tried, Error> {
        let (mine, free, taken): (Option<bool>, bool, bool) = self
            .taking(
                concat! {
                    "
                    with /* pg_idempotency: take over */ mine as materialized (
                        -- No lock if another call has changed the record: then this call replays, and would hold the
                        -- lock until its transaction ends.
                        select case when exists (
                            select from idempotency.record
                            where scope = $1::text and operation = $2::text and value = $3::text and token = $9::int8
                        ) then pg_catalog.pg_try_advisory_xact_lock($13::int8) end as mine
                    ),
                    -- A row that a sweep is deleting is skipped: no call waits for a row.
                    free as materialized (
                        select record.token
                        from mine, idempotency.record
                        where mine.mine
                            and record.scope = $1::text and record.operation = $2::text and record.value = $3::text
                        for update of record skip locked
                    ),
                    taken as (", take_over_free!(), " returning ", note_claim!("$4::int8"), ")
                    select mine.mine, exists (select from free) as free, exists (select from taken) as taken
                    from mine
                    ",
                },
                terms,
                asked,
                found_token,
                claim,
            )
            .bind(self.key.lock_id()) // $13
            .try_map(|row| Ok((row.try_get("mine")?, row.try_get("free")?, row.try_get("taken")?)))
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok(match (mine, free, taken) {
            (None, ..) | (Some(true), true, false) => Tried::Overtaken,
            (Some(false), ..) => Tried::Held,
            (Some(true), _, true) => Tried::Won(claim),
            (Some(true), false, false) => Tried::Locked,
        })
    }
}
