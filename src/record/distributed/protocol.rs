//! The statements that claim, look, take over and release on a distributed table.

use sqlx::PgConnection;

use super::citus::warn_if_plain;
use super::coordinator::{ask, forget_claim, note_claim, pass_on_lock_timeout, try_lock};
use crate::record::claim::take_over_free;
use crate::record::release::release_in_transaction;
use crate::record::statement::{Record, changes_a_row, draw_token, interval};
use crate::record::tried::{CalledAt, Claim, Found, Terms, Tried, columns};
use crate::{Error, Fingerprint, Misuse};

/// The look before this has found no record, and took the lock.
pub(super) async fn claim(record: Record<'_>, conn: &mut PgConnection, terms: &Terms) -> Result<Tried, Error> {
    warn_if_plain(&mut *conn).await?;
    let token = draw_token()?;
    let insert = record
        .query(
            "
            insert /* pg_idempotency: claim */ into idempotency.record
                (mode, scope, operation, value, fingerprint, token, expires_at, lease_until, completed_at, trace)
            values (
                $8::text, $1::text, $2::text, $3::text, $5::bytea, $4::int8,
                pg_catalog.statement_timestamp() + $6::interval,
                pg_catalog.statement_timestamp() + $7::interval,
                case when $8::text = 'mark' then pg_catalog.statement_timestamp() end,
                $9::text
            )
            on conflict (scope, operation, value) do nothing
            ",
        )
        .bind(token) // $4
        .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
        .bind(interval(terms.retention)) // $6
        .bind(terms.lease.map(interval)) // $7
        .bind(terms.mode.as_str()) // $8
        .bind(terms.trace.as_str()); // $9
    if !changes_a_row(&mut *conn, insert).await? {
        return Ok(Tried::Unread);
    }
    note_claim(conn, record.deployment, token).await?;
    Ok(Tried::Won(Claim { token, attempt: 1 }))
}

/// The columns come from the worker, and the time and the lock from the coordinator. The transaction began with the
/// check, so its age is not judged.
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
        // The claim that follows waits in its insert for a transaction in doubt that has inserted the key.
        pass_on_lock_timeout(conn).await?;
    }
    let called_at = asked.seen_at(coordinator.now.at, waited);
    Ok(match (row, coordinator.mine) {
        (Some(row), _) => Tried::Found(Found::at(&row, called_at, &coordinator.now)?),
        (None, Some(true)) => Tried::Free,
        (None, _) => Tried::Held,
    })
}

/// The lock is the coordinator's, and the row is locked and updated on its worker. A locked
/// row is skipped there, so no setting has to bound the wait.
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
        // Or it was overtaken: the next look tells.
        return Ok(Tried::Locked);
    }
    note_claim(conn, record.deployment, claim.token).await?;
    Ok(Tried::Won(claim))
}

/// Whether the record still has this token. Only columns, because a worker evaluates the functions.
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

/// A RETURNING cannot forget the claim here.
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
