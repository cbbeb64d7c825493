//! The statements that claim, look, take over and release on a distributed table. The functions at the end ask the
//! coordinator for its time, its locks, and the settings of this transaction.

use sqlx::postgres::PgRow;
use sqlx::{Executor as _, PgConnection, Row as _};

use super::citus::warn_if_plain;
use crate::record::claim::{noted_claims, take_over_free};
use crate::record::ends::release_in_transaction;
use crate::record::opening::{check, own_transaction};
use crate::record::statement::{Record, changes_a_row, draw_token, interval};
use crate::record::tried::{CalledAt, Claim, Found, Now, Terms, Tried, columns};
use crate::{Deployment, Error, Fingerprint, Misuse};

/// Claims the key after a look that has found no record and taken the lock.
pub(super) async fn claim(record: Record<'_>, conn: &mut PgConnection, terms: &Terms) -> Result<Tried, Error> {
    warn_if_plain(&mut *conn).await?;
    let token = draw_token()?;
    let insert = record
        .query(
            "
            insert /* pg_idempotency: claim */ into idempotency.record
                (mode, scope, operation, value, fingerprint, token, expires_at, lease_until, completed_at)
            values (
                $8::text, $1::text, $2::text, $3::text, $5::bytea, $4::int8,
                pg_catalog.statement_timestamp() + $6::interval,
                pg_catalog.statement_timestamp() + $7::interval,
                case when $8::text = 'mark' then pg_catalog.statement_timestamp() end
            )
            on conflict (scope, operation, value) do nothing
            ",
        )
        .bind(token) // $4
        .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
        .bind(interval(terms.retention)) // $6
        .bind(terms.lease.map(interval)) // $7
        .bind(terms.mode.as_str()); // $8
    if !changes_a_row(&mut *conn, insert).await? {
        return Ok(Tried::Unread);
    }
    note_claim(conn, record.deployment, token).await?;
    Ok(Tried::Won(Claim { token, attempt: 1 }))
}

/// Looks at the record. The columns of the record come from the worker. The time and the lock come from the
/// coordinator. The age of the transaction is not judged, because the message with the BEGIN contained the `check`.
pub(super) async fn look(record: Record<'_>, conn: &mut PgConnection, asked: &mut CalledAt) -> Result<Tried, Error> {
    let waited = asked.waited();
    let row = record
        .query(concat! {
            "
            select /* pg_idempotency: look */ ", columns!(), "
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
            ",
        })
        .fetch_optional(&mut *conn)
        .await
        .map_err(Error::of_statement)?;
    let coordinator = ask(record, conn, row.is_none()).await?;
    if row.is_none() && coordinator.has_lock_timeout {
        // A transaction whose two-phase commit is in doubt may have inserted the record of this key. The insert of the
        // claim then waits for that transaction.
        pass_on_lock_timeout(conn).await?;
    }
    let called_at = asked.seen_at(coordinator.now.at, waited);
    Ok(match (row, coordinator.mine) {
        (Some(row), _) => Tried::Found(Found::at(&row, called_at, &coordinator.now)?),
        (None, Some(true)) => Tried::Free,
        (None, _) => Tried::Held,
    })
}

/// Takes the key's lock on the coordinator, and then locks and updates the row on its worker. The statement skips a
/// locked row on the worker, so no setting has to bound a wait.
pub(super) async fn take_over(
    record: Record<'_>,
    conn: &mut PgConnection,
    terms: &Terms,
    asked: &CalledAt,
    found_token: i64,
    claim: Claim,
) -> Result<Tried, Error> {
    if !has_token(record, conn, found_token).await? {
        return Ok(Tried::Unread);
    }
    if !try_lock(record, conn).await? {
        return Ok(Tried::Held);
    }
    let update = record.taking(
        concat! {
            "
            with /* pg_idempotency: take over */ free as materialized (
                select token
                from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                for update skip locked
            )
            ", take_over_free!(), "
            ",
        },
        terms,
        asked,
        found_token,
        claim,
    );
    if !changes_a_row(&mut *conn, update).await? {
        // The row is locked, or another call has taken it over. The next look distinguishes these cases.
        return Ok(Tried::Locked);
    }
    note_claim(conn, record.deployment, claim.token).await?;
    Ok(Tried::Won(claim))
}

/// Whether the record still has this token. The statement only reads columns, because a worker would evaluate
/// functions.
async fn has_token(record: Record<'_>, conn: &mut PgConnection, token: i64) -> Result<bool, Error> {
    record
        .query(
            "
        select /* pg_idempotency: has token */
        from idempotency.record
        where scope = $1::text and operation = $2::text and value = $3::text and token = $4::int8
        ",
        )
        .bind(token) // $4
        .fetch_optional(conn)
        .await
        .map(|row| row.is_some())
        .map_err(Error::of_statement)
}

/// Releases the claim. A second statement removes the token from the claims of the transaction, because on a
/// distributed table RETURNING may not contain `set_config`.
pub(super) async fn release_in_transaction(
    record: Record<'_>,
    conn: &mut PgConnection,
    claim: Claim,
) -> Result<(), Error> {
    let update = record
        .query(release_in_transaction!())
        .bind(claim.token) // $4
        .bind(draw_token()?); // $5
    if !changes_a_row(&mut *conn, update).await? {
        return Err(Error::Misuse(Misuse::NotInTransaction));
    }
    forget_claim(conn, record.deployment, claim.token).await
}

/// Begins a transaction whose COMMIT is durable on the workers, too. Citus passes `set local` on to the workers, but
/// not a setting that a function changes. Without this message, each worker would commit with its own
/// `synchronous_commit`. The session's `lock_timeout` bounds the waits for a row on a worker. On a server without
/// Citus, nothing is passed on.
macro_rules! durable_on_workers {
    () => {
        "begin; set local citus.propagate_set_commands = 'local'; do $$ begin
            execute pg_catalog.format('set local synchronous_commit = %L', case
                when pg_catalog.current_setting('synchronous_commit') in ('off', 'local') then 'on'
                else pg_catalog.current_setting('synchronous_commit')
            end);
            if pg_catalog.current_setting('lock_timeout') <> '0' then
                execute pg_catalog.format('set local lock_timeout = %L', pg_catalog.current_setting('lock_timeout'));
            end if;
        end $$"
    };
}

/// Does what [`BEGIN_DURABLE`](crate::record::opening::BEGIN_DURABLE) does, also on the workers.
pub(super) const BEGIN_DURABLE: &str = concat!(
    check!("opening durable"),
    ", pg_catalog.set_config('idempotency.claim', ",
    own_transaction!("step"),
    ", true); ",
    durable_on_workers!()
);

/// Does what [`BEGIN_DURABLE_ALL_ROWS`](crate::record::opening::BEGIN_DURABLE_ALL_ROWS) does, also on the workers.
pub(super) const BEGIN_DURABLE_ALL_ROWS: &str = concat!(
    check!("opening of decision"),
    ", pg_catalog.set_config('row_security', 'off', true); ",
    durable_on_workers!()
);

/// The coordinator's answer to a statement that names no table.
struct Coordinator {
    now: Now,
    /// Whether this transaction has the key's lock. `None` if the statement did not try the lock.
    mine: Option<bool>,
    has_lock_timeout: bool,
}

/// Passes the session's `lock_timeout` on to the workers until the end of the transaction. Does nothing if the session
/// has no `lock_timeout`. Citus passes on a `set local`, but only while `citus.propagate_set_commands` is `local`.
async fn pass_on_lock_timeout(conn: &mut PgConnection) -> Result<(), Error> {
    let passed_on = conn.execute(
        "
        do /* pg_idempotency: pass on lock_timeout */ $$
        declare
            callers text := pg_catalog.current_setting('citus.propagate_set_commands', true);
        begin
            if pg_catalog.current_setting('lock_timeout') <> '0' then
                set local citus.propagate_set_commands = 'local';
                execute pg_catalog.format('set local lock_timeout = %L', pg_catalog.current_setting('lock_timeout'));
                perform pg_catalog.set_config('citus.propagate_set_commands', coalesce(callers, 'none'), true);
            end if;
        end
        $$
        ",
    );
    passed_on.await.map(drop).map_err(Error::of_statement)
}

/// Passes the transaction's `synchronous_commit` and `lock_timeout` on to the workers.
pub(super) async fn pass_on_synchronous_commit(conn: &mut PgConnection) -> Result<(), Error> {
    let passed_on = conn.execute(
        "
        do /* pg_idempotency: pass on synchronous_commit */ $$
        declare
            callers text := pg_catalog.current_setting('citus.propagate_set_commands', true);
        begin
            set local citus.propagate_set_commands = 'local';
            execute pg_catalog.format(
                'set local synchronous_commit = %L', pg_catalog.current_setting('synchronous_commit')
            );
            perform pg_catalog.set_config('citus.propagate_set_commands', coalesce(callers, 'none'), true);
        end
        $$
        ",
    );
    passed_on.await.map_err(Error::of_statement)?;
    pass_on_lock_timeout(conn).await
}

/// Adds a token to the claims of this transaction. The claims are stored in a setting on the coordinator.
async fn note_claim(conn: &mut PgConnection, deployment: Deployment, token: i64) -> Result<(), Error> {
    let sql = concat! {
        "
        select /* pg_idempotency: note claim */
            pg_catalog.set_config('idempotency.claim', ", noted_claims!(), " || ' ' || $1::int8::text, true)
        ",
    };
    ask_setting(sql, conn, deployment, token).await
}

/// Removes a token from the claims of this transaction.
async fn forget_claim(conn: &mut PgConnection, deployment: Deployment, token: i64) -> Result<(), Error> {
    let sql = "
        select /* pg_idempotency: forget claim */
            pg_catalog.set_config('idempotency.claim', pg_catalog.array_to_string(pg_catalog.array_remove(
                pg_catalog.string_to_array(pg_catalog.current_setting('idempotency.claim', true), ' '), $1::int8::text
            ), ' '), true)
        ";
    ask_setting(sql, conn, deployment, token).await
}

async fn ask_setting(
    sql: &'static str,
    conn: &mut PgConnection,
    deployment: Deployment,
    token: i64,
) -> Result<(), Error> {
    let query = sqlx::query(sql).persistent(deployment.prepared).bind(token); // $1
    query.execute(conn).await.map(drop).map_err(Error::of_statement)
}

/// Takes the key's lock until the end of the transaction. Returns `false` if another transaction has the key's lock.
async fn try_lock(record: Record<'_>, conn: &mut PgConnection) -> Result<bool, Error> {
    Ok(ask(record, conn, true).await?.mine == Some(true))
}

async fn ask(record: Record<'_>, conn: &mut PgConnection, lock: bool) -> Result<Coordinator, Error> {
    sqlx::query(
        "
        select /* pg_idempotency: coordinator */
            pg_catalog.statement_timestamp() as at,
            pg_catalog.current_setting('idempotency.claim', true) as claims,
            case when $2::bool then pg_catalog.pg_try_advisory_xact_lock($1::int8) end as mine,
            pg_catalog.current_setting('lock_timeout') <> '0' as has_lock_timeout
        ",
    )
    .persistent(record.deployment.prepared)
    .bind(record.key.lock_id()) // $1
    .bind(lock) // $2
    .try_map(|row: PgRow| {
        Ok(Coordinator {
            now: Now { at: row.try_get("at")?, claims: row.try_get("claims")? },
            mine: row.try_get("mine")?,
            has_lock_timeout: row.try_get("has_lock_timeout")?,
        })
    })
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}
