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

use super::citus::is_distributed;
use super::claim::{Claim, Terms};
use super::fragment::step_in_doubt;
use super::look::{Found, LeaseState, Look, Standing};
use super::statement::{Record, Response, changes_a_row, draw_token, interval};
use crate::{Error, Fingerprint, Mode};

/// The coordinator's answer to a statement without a table.
pub(super) struct Coordinator {
    /// The start of the transaction.
    now: DateTime<Utc>,
    at: DateTime<Utc>,
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

impl Record<'_> {
    /// After a look that found no record and took the lock.
    pub(super) async fn claim_distributed(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
    ) -> Result<Option<Claim>, Error> {
        let token = draw_token()?;
        let insert = self
            .query(
                "
                insert into idempotency.record
                    (mode, scope, operation, key, fingerprint, token, expires_at, lease_until, completed_at)
                values (
                    $8::text, $1::text, $2::text, $3::text, $4::bytea, $5::int8,
                    pg_catalog.statement_timestamp() + $6::interval,
                    pg_catalog.statement_timestamp() + $7::interval,
                    case when $8::text = 'mark' then pg_catalog.statement_timestamp() end
                )
                on conflict (scope, operation, key) do nothing
                ",
            )
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes))
            .bind(token)
            .bind(interval(terms.retention))
            .bind(terms.lease.map(interval))
            .bind(terms.mode.as_str());
        Ok(changes_a_row(conn, insert).await?.then_some(Claim { token, attempt: 1 }))
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
                    mode, fingerprint, token, attempt, claimed_at, last_error,
                    steps is not null as has_steps, ", step_in_doubt!(), " as step_in_doubt,
                    completed_at is not null as completed,
                    lease_until = '-infinity' as released,
                    -- A client cannot read an infinity, which somebody may have set by hand.
                    case when lease_until > '-infinity' then least(lease_until, '9999-12-31') end as lease_until,
                    greatest(least(expires_at, '9999-12-31'), 'epoch') as expires_at,
                    response_status, response_headers::text as response_headers, response_body
                from idempotency.record
                where scope = $1::text and operation = $2::text and key = $3::text
                ",
            })
            .fetch_optional(&mut *conn)
            .await
            .map_err(Error::of_statement)?;
        let coordinator = self.ask_coordinator(conn, row.is_none()).await?;
        if row.is_none() && coordinator.has_lock_timeout {
            // The claim that follows waits in its insert for a large batch of marks that has inserted the key.
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
            .query(
                "
                select
                    fingerprint, response_status, response_headers::text as response_headers, response_body,
                    greatest(least(expires_at, '9999-12-31'), 'epoch') as expires_at
                from idempotency.record
                where scope = $1::text and operation = $2::text and key = $3::text
                    and mode = $4::text
                    and completed_at is not null
                    and pg_catalog.pg_current_xact_id_if_assigned() is null
                ",
            )
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
                pg_catalog.now() as now, pg_catalog.statement_timestamp() as at,
                case when $2::bool then pg_catalog.pg_try_advisory_xact_lock($1::int8) end as mine,
                pg_catalog.current_setting('lock_timeout') <> '0' as has_lock_timeout
            ",
        )
        .persistent(self.deployment.prepared)
        .bind(self.key.lock_id())
        .bind(lock)
        .try_map(|row: PgRow| {
            Ok(Coordinator {
                now: row.try_get("now")?,
                at: row.try_get("at")?,
                mine: row.try_get("mine")?,
                has_lock_timeout: row.try_get("has_lock_timeout")?,
            })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
    }

    /// The error, or [`Error::WrongDeployment`] if the table is distributed and the deployment does not say so: then a
    /// worker's clock may be the reason for the error. Only for errors that this explains.
    pub(crate) async fn or_wrong_deployment(self, conn: &mut PgConnection, error: Error) -> Error {
        match is_distributed(conn).await {
            Ok(true) if !self.deployment.distributed => Error::WrongDeployment { source: error.into() },
            _ => error,
        }
    }
}

impl Found {
    /// The record as of the coordinator's time.
    fn at(row: &PgRow, asked: DateTime<Utc>, coordinator: &Coordinator) -> sqlx::Result<Self> {
        let claimed_at: DateTime<Utc> = row.try_get("claimed_at")?;
        let expires_at: DateTime<Utc> = row.try_get("expires_at")?;
        let lease_until: Option<DateTime<Utc>> = row.try_get("lease_until")?;
        let lease = match (lease_until, row.try_get("released")?) {
            (_, Some(true)) => LeaseState::Released,
            (None, _) => LeaseState::None,
            (Some(until), _) => match (until - coordinator.at).to_std() {
                Ok(left) if !left.is_zero() => LeaseState::Live(left),
                _ => LeaseState::Lapsed,
            },
        };
        Ok(Self {
            mode: Mode::from_column(row.try_get("mode")?),
            fingerprint: row.try_get("fingerprint")?,
            token: row.try_get("token")?,
            attempt: row.try_get("attempt")?,
            claimed_at,
            claimed_by_this_transaction: claimed_at == coordinator.now,
            lease,
            completed: row.try_get("completed")?,
            expired: expires_at <= asked && !matches!(lease, LeaseState::Live(_)),
            response: Response::of(row)?,
            last_error: row.try_get("last_error")?,
            has_steps: row.try_get("has_steps")?,
            step_in_doubt: row.try_get("step_in_doubt")?,
        })
    }
}
