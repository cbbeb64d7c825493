//! A claim on a distributed table, after a look that found no record and took the lock.

use sqlx::PgConnection;

use super::citus::warn_if_plain;
use super::coordinator::note_claim;
use crate::record::claim::{Claim, Terms};
use crate::record::statement::{Record, changes_a_row, draw_token, interval};
use crate::{Error, Fingerprint};

/// As [`Record::claim`].
pub(crate) async fn claim(record: Record<'_>, conn: &mut PgConnection, terms: &Terms) -> Result<Option<Claim>, Error> {
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
        return Ok(None);
    }
    note_claim(conn, record.deployment, token).await?;
    Ok(Some(Claim { token, attempt: 1 }))
}
