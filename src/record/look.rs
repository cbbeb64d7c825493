//! The statements that read a record that is in the way of a claim, or only its response, and the statements that wait
//! for the transaction that holds the key.

use std::time::Duration;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::statement::{Record, age};
use super::tried::{CalledAt, Found, Now, Terms, Tried, columns};
use crate::outcome::StoredResponse;
use crate::{Error, Fingerprint, Mode, observe};

impl Record<'_> {
    /// Looks at the record in a new snapshot, because an owner may have committed since the claim's snapshot.
    ///
    /// A look that finds a record takes no lock, because the caller's transaction would hold the lock to its end.
    pub(crate) async fn look(self, conn: &mut PgConnection, asked: &mut CalledAt) -> Result<Tried, Error> {
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

/// A statement that reads the response that a call with the mode $4 and the fingerprint $5 replays. Under these
/// conditions, `answer` of `claim/answer.rs` permits the replay. A look finds the other replays, for example of a
/// record that has expired during the wait of the call.
macro_rules! response {
    ($name:literal, $columns:literal, $conditions:literal) => {
        concat!(
            "
            select /* pg_idempotency: ",
            $name,
            " */
                response_status, response_headers::text as response_headers, response_body, token",
            $columns,
            "
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
                and mode = $4::text
                and fingerprint is not distinct from $5::bytea
                and completed_at is not null
                and ",
            $crate::record::statement::not_expired!(),
            "
                ",
            $conditions
        )
    };
}

impl<'k> Record<'k> {
    /// After a claim has inserted no row, finds the response for a replay. Most calls that end here are replays, and
    /// this statement needs fewer columns than a look and no outer join. The statement takes no lock.
    pub(crate) async fn response(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: &mut CalledAt,
    ) -> Result<Option<StoredResponse>, Error> {
        let statement = response!("response", ", pg_catalog.clock_timestamp() - pg_catalog.now() as age", "");
        let row = self.replaying(statement, terms).fetch_optional(conn).await.map_err(Error::of_statement)?;
        let Some(row) = row else { return Ok(None) };
        asked.judge(age(&row)?)?;
        replayed(&row).map(Some).map_err(Error::of_statement)
    }

    /// Under [`replay_first`](crate::Idempotency::replay_first), finds the response for a replay in one round trip,
    /// before any transaction begins. Returns `None` if the statement finds no response for this call, or if the
    /// statement fails. The claim that follows meets the same state, and returns the answer or the error. Also returns
    /// `None` if the connection is in an open transaction that has written something. Such a transaction may see a
    /// record that is not committed.
    pub(crate) async fn select_first(self, conn: &mut PgConnection, terms: &Terms) -> Option<StoredResponse> {
        let statement = response!(
            "select first",
            "",
            "and pg_catalog.pg_current_xact_id_if_assigned() is null and idempotency.is_plain()"
        );
        replayed(&self.replaying(statement, terms).fetch_optional(conn).await.ok()??).ok()
    }

    fn replaying<'q>(self, statement: &'static str, terms: &'q Terms) -> Query<'q, Postgres, PgArguments>
    where
        'k: 'q,
    {
        self.query(statement)
            .bind(terms.mode.as_str()) // $4
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
    }
}

fn replayed(row: &PgRow) -> sqlx::Result<StoredResponse> {
    let response = StoredResponse::of(row)?;
    observe::token(row.try_get("token")?);
    Ok(response)
}

impl Record<'_> {
    /// Waits until the open transaction that holds the key ends. The wait lasts at most `limit`. A shorter
    /// `lock_timeout` of the session ends the wait earlier. Returns [`Tried::Held`] when the time is over. The
    /// transaction is usable in every case.
    ///
    /// After an owner has rolled back, exactly one of the waiting calls gets [`Tried::Free`]. If each waiting call
    /// tried to claim, all but one would claim in vain. The wait is an SQL function, because a savepoint that the crate
    /// sent would remain if the wait were cancelled.
    ///
    /// If the key has an unfinished record in another mode that has not expired, the transaction does not keep the
    /// lock, because in most modes the call must not take such a record over. A claim of a lease waits here for at most
    /// a second, for a transaction that is just claiming or completing the key.
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
                // "timeout"
                _ => Tried::Held,
            })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
    }
}

/// Waits 10 ms, because a transaction that does not hold the key's advisory lock has locked the row. All such
/// transactions are short. The server sleeps, because this crate does not choose the async runtime. If the server's
/// clock is set back during the sleep, the sleep lasts until the clock shows the old time again, or until
/// `pg_cancel_backend` ends it.
pub(crate) async fn pause(conn: &mut PgConnection, persistent: bool) -> Result<(), Error> {
    let pause = sqlx::query("select /* pg_idempotency: pause */ pg_catalog.pg_sleep(0.01)").persistent(persistent);
    pause.execute(conn).await.map(drop).map_err(Error::of_statement)
}
