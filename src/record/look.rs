//! Looking at the record that is in the way of a claim, and waiting for the end of the transaction that has it.

use std::time::Duration;

use sqlx::{PgConnection, Row as _};

use super::statement::{Record, age};
use super::tried::{CalledAt, Found, Now, Terms, Tried, columns};
use crate::fingerprint::Comparison;
use crate::outcome::Response;
use crate::{Deployment, Error, Mode, observe};

impl Record<'_> {
    /// The usual [`look`](Record::look), in one statement.
    pub(super) async fn look_and_lock(self, conn: &mut PgConnection, asked: &mut CalledAt) -> Result<Tried, Error> {
        let waited = asked.waited();
        let row = self
            .query(concat! {
                "
                select /* pg_idempotency: look */
                    pg_catalog.statement_timestamp() as at,
                    pg_catalog.clock_timestamp() - pg_catalog.now() as age,
                    pg_catalog.current_setting('idempotency.claim', true) as claims,
                    case when record.token is null then pg_catalog.pg_try_advisory_xact_lock($4::int8) end as mine,
                    ", columns!(), "
                from (select) as one
                left join idempotency.record on scope = $1::text and operation = $2::text and value = $3::text
                ",
            })
            .bind(self.key.lock_id()) // $4
            .fetch_one(conn)
            .await
            .map_err(Error::of_statement)?;
        asked.judge(age(&row)?)?;
        let now = Now { at: row.try_get("at")?, claims: row.try_get("claims")? };
        let called_at = asked.seen_at(now.at, waited);
        Ok(match row.try_get("mine")? {
            None => Tried::Found(Found::at(&row, called_at, &now)?),
            Some(true) => Tried::Free,
            Some(false) => Tried::Held,
        })
    }
}

impl Record<'_> {
    /// The option *select first*: a replay in one round trip, before any transaction begins. Returns `None` if it finds
    /// anything else, or if the statement fails: the claim that follows meets the same state, and returns the answer or
    /// the error. Also returns `None` if the connection is in an open transaction that has written something, because
    /// the record that it sees may not be committed.
    ///
    /// Without prepared statements, the function sends nothing, because sqlx would send the statement in two messages.
    /// Between the two, a pooler in transaction mode may change the server connection, and the unnamed statement of the
    /// new connection belongs to another client.
    pub(crate) async fn select_first(self, conn: &mut PgConnection, terms: &Terms) -> Option<Response> {
        if !self.deployment.prepared || !self.deployment.saves_round_trips() {
            return None;
        }
        let row = self
            .query(
                "
                select /* pg_idempotency: select first */
                    fingerprint, response_status, response_headers::text as response_headers, response_body, trace
                from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                    and mode = $4::text
                    and completed_at is not null
                    and expires_at > pg_catalog.statement_timestamp()
                    and pg_catalog.pg_current_xact_id_if_assigned() is null
                    and idempotency.is_plain()
                ",
            )
            .bind(terms.mode.as_str()) // $4
            .fetch_optional(conn)
            .await
            .ok()??;
        if terms.fingerprint?.compare(row.try_get("fingerprint").ok()?) != Comparison::Same {
            return None;
        }
        observe::replaying(row.try_get("trace").ok()?);
        Response::of(&row).ok()
    }
}

impl Record<'_> {
    /// Waits for the open transaction that holds the key, for at most `limit`, or for the caller's own `lock_timeout`
    /// if that is shorter. [`Tried::Held`] means that the time is over. The transaction is usable in every case.
    ///
    /// After an owner has rolled back, exactly one of the waiting calls is told to claim: when all
    /// of them tried, 100 waiting calls and 20 rollbacks took 1300 claims in place of 121. It is a function, because a
    /// savepoint that the crate sent would remain if the wait were cancelled. The transaction does not keep the lock of
    /// an unfinished record in another mode, which it must not take over: only calls in transaction mode and marks wait
    /// here, and neither may follow another mode.
    pub(crate) async fn await_key(
        self,
        conn: &mut PgConnection,
        limit: Duration,
        asked: &CalledAt,
        mode: Mode,
    ) -> Result<Tried, Error> {
        self.query(
            "
            select /* pg_idempotency: await */
                idempotency.await_key($1::text, $2::text, $3::text, $4::int8, $5::int8, $6::timestamptz, $7::text)
            ",
        )
        .bind(self.key.lock_id()) // $4
        .bind(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX).max(1)) // $5
        .bind(asked.at) // $6
        .bind(mode.as_str()) // $7
        .try_map(|row| {
            Ok(match row.try_get(0)? {
                "claim" => Tried::Free,
                "look" => Tried::Unread,
                _ => Tried::Held,
            })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
    }
}

/// Waits 10 ms for a row that another transaction has locked without the key's advisory lock. No lock shows when such a
/// transaction ends, but all of them are short. The server sleeps, because this crate does not choose the runtime.
pub(crate) async fn wait_for_row(conn: &mut PgConnection, deployment: Deployment) -> Result<(), Error> {
    let pause =
        sqlx::query("select /* pg_idempotency: pause */ pg_catalog.pg_sleep(0.01)").persistent(deployment.prepared);
    pause.execute(conn).await.map(drop).map_err(Error::of_statement)
}
