//! Calls of the SQL functions, as a driver of another language would make them.

use pg_idempotency::Key;
use sqlx::postgres::types::PgInterval;
use sqlx::{PgConnection, Row as _};

/// The row of `idempotency.ensure`.
#[derive(Debug, PartialEq)]
pub struct Answer {
    pub outcome: String,
    pub token: Option<i64>,
    pub status: Option<i32>,
    /// JSON text.
    pub headers: Option<String>,
    pub body: Option<Vec<u8>>,
    pub retry_after: Option<PgInterval>,
}

/// Calls `idempotency.ensure`. Without a `wait`, with its default.
pub async fn ensure(
    conn: &mut PgConnection,
    key: &Key,
    fingerprint: &[u8],
    wait: Option<&str>,
) -> sqlx::Result<Answer> {
    let row = sqlx::query(
        "select outcome, token, status, headers::text, body, retry_after
         from idempotency.ensure(
             scope => $1, operation => $2, value => $3, fingerprint => $4, wait => $5::text::interval
         )",
    )
    .bind(key.scope())
    .bind(key.operation())
    .bind(key.value())
    .bind(fingerprint)
    .bind(wait)
    .fetch_one(conn)
    .await?;
    Ok(Answer {
        outcome: row.try_get("outcome")?,
        token: row.try_get("token")?,
        status: row.try_get("status")?,
        headers: row.try_get("headers")?,
        body: row.try_get("body")?,
        retry_after: row.try_get("retry_after")?,
    })
}

/// Calls `idempotency.complete`. The headers are JSON text.
pub async fn complete(
    conn: &mut PgConnection,
    key: &Key,
    token: Option<i64>,
    (status, headers, body): (Option<i32>, Option<&str>, Option<&[u8]>),
) -> sqlx::Result<()> {
    sqlx::query(
        "select idempotency.complete(
             scope => $1, operation => $2, value => $3, token => $4, status => $5, headers => $6::text::jsonb, body => $7
         )",
    )
    .bind(key.scope())
    .bind(key.operation())
    .bind(key.value())
    .bind(token)
    .bind(status)
    .bind(headers)
    .bind(body)
    .execute(conn)
    .await
    .map(drop)
}
