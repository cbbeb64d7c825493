//! The statements that a table distributed by Citus needs instead of the usual ones.
//!
//! A worker evaluates the functions in a SELECT from the table, so its clock and its locks would count. Here such a
//! SELECT only reads columns, and another statement, which names no table, asks the coordinator for the time and the
//! lock. An INSERT of VALUES goes to one shard and needs no two-phase commit; `insert … select` would need one over all
//! shards.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::postgres::PgRow;
use sqlx::{Executor as _, PgConnection, Row as _};

use super::citus::warn_if_plain;
use super::claim::{Claim, Terms};
use super::fragment::{forget_claim, has_steps, note_claim, readable, settled_by_an_operator, steps_in_doubt};
use super::look::{Found, Look, Standing};
use super::statement::{Record, Response, changes_a_row, draw_token, interval};
use super::step::in_doubt;
use crate::state::State;
use crate::{Deployment, Error, Fingerprint, Mode};

/// The coordinator's answer to a statement without a table.
pub(super) struct Coordinator {
    at: DateTime<Utc>,
    /// The tokens that this transaction has claimed with.
    claims: Option<String>,
    /// Whether this transaction has the key's lock; `None` if the statement did not try.
    mine: Option<bool>,
    has_lock_timeout: bool,
}

/// Gives the session's `lock_timeout`, if it has one, to the workers until the end of the transaction. Citus passes on
/// `set local` alone, and only while `citus.propagate_set_commands` says so.
pub(super) async fn pass_on_lock_timeout(conn: &mut PgConnection) -> Result<(), Error> {
    let passed_on = conn.execute(
        "
        do $$
        declare
            callers text := current_setting('citus.propagate_set_commands', true);
        begin
            if current_setting('lock_timeout') <> '0' then
                set local citus.propagate_set_commands = 'local';
                execute format('set local lock_timeout = %L', current_setting('lock_timeout'));
                perform set_config('citus.propagate_set_commands', coalesce(callers, 'none'), true);
            end if;
        end
        $$
        ",
    );
    passed_on.await.map(drop).map_err(Error::of_statement)
}

/// Adds a token to the claims of this transaction, which the coordinator knows.
pub(super) async fn note_claim(conn: &mut PgConnection, deployment: Deployment, token: i64) -> Result<(), Error> {
    ask_setting(concat!("select ", note_claim!("$1::int8")), conn, deployment, token).await
}

/// Removes a token from the claims of this transaction.
pub(super) async fn forget_claim(conn: &mut PgConnection, deployment: Deployment, token: i64) -> Result<(), Error> {
    ask_setting(concat!("select ", forget_claim!("$1::int8")), conn, deployment, token).await
}

async fn ask_setting(
    sql: &'static str,
    conn: &mut PgConnection,
    deployment: Deployment,
    token: i64,
) -> Result<(), Error> {
    let query = sqlx::query(sql).persistent(deployment.prepared).bind(token);
    query.execute(conn).await.map(drop).map_err(Error::of_statement)
}

impl Record<'_> {
    /// After a look that found no record and took the lock.
    pub(super) async fn claim_distributed(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
    ) -> Result<Option<Claim>, Error> {
        warn_if_plain(&mut *conn).await?;
        let token = draw_token()?;
        let insert = self
            .query(
                "
                insert into idempotency.record
                    (mode, scope, operation, value, fingerprint, token, expires_at, lease_until, completed_at)
                values (
                    $8::text, $1::text, $2::text, $3::text, $4::bytea, $5::int8,
                    pg_catalog.statement_timestamp() + $6::interval,
                    pg_catalog.statement_timestamp() + $7::interval,
                    case when $8::text = 'mark' then pg_catalog.statement_timestamp() end
                )
                on conflict (scope, operation, value) do nothing
                ",
            )
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes))
            .bind(token)
            .bind(interval(terms.retention))
            .bind(terms.lease.map(interval))
            .bind(terms.mode.as_str());
        if !changes_a_row(&mut *conn, insert).await? {
            return Ok(None);
        }
        note_claim(conn, self.deployment, token).await?;
        Ok(Some(Claim { token, attempt: 1 }))
    }

    pub(super) async fn look_distributed(
        self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
        waited: Duration,
    ) -> Result<Look, Error> {
        let row = self
            .query(concat! {
                "
                select
                    mode, fingerprint, token, attempt, last_error, ", readable!("claimed_at"), " as claimed_at,
                    ", has_steps!(), " as has_steps, ", steps_in_doubt!(), "::text as steps_in_doubt,
                    ", settled_by_an_operator!(), " as settled_by_an_operator,
                    completed_at is not null as completed,
                    lease_until is not distinct from '-infinity' as released,
                    ", readable!("lease_until"), " as lease_until, ", readable!("expires_at"), " as expires_at,
                    response_status, response_headers::text as response_headers, response_body
                from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                ",
            })
            .fetch_optional(&mut *conn)
            .await
            .map_err(Error::of_statement)?;
        let coordinator = self.ask_coordinator(conn, row.is_none()).await?;
        if row.is_none() && coordinator.has_lock_timeout {
            // The claim that follows waits in its insert for a transaction in doubt that has inserted the key.
            pass_on_lock_timeout(conn).await?;
        }
        // The smaller, because the clock may have jumped back: a record must not expire before its time.
        let called = coordinator.at - TimeDelta::from_std(waited).unwrap_or_default();
        let asked = asked.map_or(called, |first| first.min(called));
        let standing = match (row, coordinator.mine) {
            (Some(row), _) => Standing::Found(Found::at(&row, asked, &coordinator).map_err(Error::of_statement)?),
            (None, Some(true)) => Standing::Free,
            (None, _) => Standing::Held,
        };
        Ok(Look { asked, standing })
    }

    /// As [`select_first`](Self::select_first), in one round trip more. The worker knows whether this transaction has
    /// written to the shard of the record.
    pub(super) async fn select_first_distributed(self, conn: &mut PgConnection, mode: Mode) -> Option<PgRow> {
        let row = self
            .query(concat! {
                "
                select
                    fingerprint, response_status, response_headers::text as response_headers, response_body,
                    ", readable!("expires_at"), " as expires_at
                from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                    and mode = $4::text
                    and completed_at is not null
                    and pg_catalog.pg_current_xact_id_if_assigned() is null
                ",
            })
            .bind(mode.as_str())
            .fetch_optional(&mut *conn)
            .await
            .ok()??;
        let expires_at: DateTime<Utc> = row.try_get("expires_at").ok()?;
        let coordinator = self.ask_coordinator(conn, false).await.ok()?;
        (expires_at > coordinator.at).then_some(row)
    }

    /// Takes the key's lock until the end of the transaction, if it is free.
    pub(super) async fn try_lock(self, conn: &mut PgConnection) -> Result<bool, Error> {
        Ok(self.ask_coordinator(conn, true).await?.mine == Some(true))
    }

    async fn ask_coordinator(self, conn: &mut PgConnection, lock: bool) -> Result<Coordinator, Error> {
        sqlx::query(
            "
            select
                pg_catalog.statement_timestamp() as at,
                pg_catalog.current_setting('idempotency.claim', true) as claims,
                case when $2::bool then pg_catalog.pg_try_advisory_xact_lock($1::int8) end as mine,
                pg_catalog.current_setting('lock_timeout') <> '0' as has_lock_timeout
            ",
        )
        .persistent(self.deployment.prepared)
        .bind(self.key.lock_id())
        .bind(lock)
        .try_map(|row: PgRow| {
            Ok(Coordinator {
                at: row.try_get("at")?,
                claims: row.try_get("claims")?,
                mine: row.try_get("mine")?,
                has_lock_timeout: row.try_get("has_lock_timeout")?,
            })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
    }
}

impl Coordinator {
    fn has_claimed_with(&self, token: i64) -> bool {
        let token = token.to_string();
        self.claims.iter().flat_map(|claims| claims.split(' ')).any(|claim| claim == token)
    }
}

impl Found {
    /// The record as of the coordinator's time. A worker would evaluate the SQL expression of the state by its own clock,
    /// so its lines are here again, with the same order.
    fn at(row: &PgRow, asked: DateTime<Utc>, coordinator: &Coordinator) -> sqlx::Result<Self> {
        let token: i64 = row.try_get("token")?;
        let expires_at: DateTime<Utc> = row.try_get("expires_at")?;
        let lease_until: Option<DateTime<Utc>> = row.try_get("lease_until")?;
        let lease_left =
            lease_until.and_then(|until| (until - coordinator.at).to_std().ok()).filter(|left| !left.is_zero());
        let mode = Mode::from_column(row.try_get("mode")?);
        let steps_in_doubt = in_doubt(row)?;
        let state = if expires_at <= asked && lease_left.is_none() {
            State::Expired
        } else if row.try_get("completed")? {
            if matches!(mode, Ok(Mode::Mark)) { State::Mark } else { State::Completed }
        } else if lease_left.is_some() {
            State::InFlight
        } else if !steps_in_doubt.is_empty() {
            State::Indeterminate
        } else if row.try_get("released")? {
            State::Released
        } else if lease_until.is_some() && mode.as_ref().is_ok_and(|mode| mode.repeats()) {
            State::Lapsed
        } else {
            State::Indeterminate
        };
        Ok(Self {
            mode,
            fingerprint: row.try_get("fingerprint")?,
            token,
            attempt: row.try_get("attempt")?,
            claimed_at: row.try_get("claimed_at")?,
            claimed_by_this_transaction: coordinator.has_claimed_with(token),
            state,
            lease_left,
            response: Response::of(row)?,
            last_error: row.try_get("last_error")?,
            has_steps: row.try_get("has_steps")?,
            steps_in_doubt,
            settled_by_an_operator: row.try_get("settled_by_an_operator")?,
        })
    }
}
