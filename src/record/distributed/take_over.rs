//! Taking over a record of a distributed table.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use super::coordinator::{note_claim, try_lock};
use crate::Error;
use crate::record::claim::{Claim, Terms, Tried};
use crate::record::statement::{Record, changes_a_row};
use crate::record::take_over::take_over_free;

/// As [`Record::take_over`]. The lock is the coordinator's, and the row is locked and updated on its worker. A locked
/// row is skipped there, so no setting has to bound the wait.
pub(crate) async fn take_over(
    record: Record<'_>,
    conn: &mut PgConnection,
    terms: &Terms,
    asked: DateTime<Utc>,
    found_token: i64,
    claim: Claim,
) -> Result<Tried, Error> {
    if !has_token(record, conn, found_token).await? {
        return Ok(Tried::Overtaken);
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
